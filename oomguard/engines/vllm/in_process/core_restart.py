"""Give a running front end a client that restarts the engine core after its death.

The client takes the place of the one that the front end (``LLMEngine``, ``AsyncLLM``) has.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from oomguard.engines.vllm.in_process.core_client import (
    RestartCore,
    RestartingClient,
    as_engine_dead_error,
    is_core_death,
    outputs_of,
)


def can_restart_core(engine: Any) -> bool:
    """Return whether an engine's core is another process with a single client.

    It is not with data parallelism, nor if the core runs in this process.
    """
    client = getattr(engine, "engine_core", None)
    needed = ("resources", "outputs_queue", "add_request")
    is_single = type(client).__name__ in {"SyncMPClient", "AsyncMPClient"} and not getattr(
        client, "is_dp", False
    )
    return is_single and all(hasattr(client, name) for name in needed)


def install_restarting_client(engine: Any, make_again: RestartCore) -> None:
    """Replace the engine's client by one that outlives the engine core."""
    client = engine.engine_core
    if type(client).__name__ == "SyncMPClient":
        engine.engine_core = RestartingSyncClient(engine, client, make_again)
        return
    engine.engine_core = RestartingAsyncClient(engine, client, make_again)
    handler = getattr(engine, "output_handler", None)
    if handler is not None:  # it still reads from the engine's own client
        handler.cancel()
        engine.output_handler = None
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            engine._run_output_handler()


class RestartingSyncClient(RestartingClient):
    """The restarting client of ``LLMEngine``."""

    def __init__(self, engine: Any, inner: Any, make_again: RestartCore) -> None:
        super().__init__(engine, inner, make_again)
        self._failed: list[Any] = []
        self._raised_last: Exception | None = None

    def add_request(self, request: Any) -> None:
        """Send a request; if the core has died, restart it first."""
        if not self.unfinished.add(request) and not self.is_given_up:
            return
        try:
            self.inner.add_request(request)
        except Exception as error:  # noqa: BLE001 - raised again unless the core is restarted
            self._died(error)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests."""
        self.unfinished.drop(request_ids)
        self.inner.abort_requests(request_ids)
        self._send(self.unfinished.next())

    def get_output(self) -> Any:
        """Return the core's next outputs; if the core has died, restart it first."""
        while True:
            if self._failed:
                failed = self._failed
                self._failed = []
                return outputs_of(failed)
            if self._raised_last is not None and not len(self.unfinished):
                self.shutdown()
                raise self.with_vectors(self._raised_last)
            try:
                outputs = self.unfinished.take(self.inner.get_output())
            except Exception as error:  # noqa: BLE001 - as in add_request
                self._died(error)
                continue
            if differing := self.differing():
                self.inner.abort_requests(list(differing))
                self._failed += self.failure_outputs(differing)
            self._send(self.unfinished.next())
            return outputs

    def fail(self, name: str, error: Exception) -> None:
        """Raise the exception once all other requests are done.

        vLLM has no other way to report a failed pooling request.
        """
        del name
        self._raised_last = self._raised_last or error

    def _died(self, error: Exception) -> None:
        if not is_core_death(error, self.inner):
            raise error
        error = as_engine_dead_error(error)
        made = self.replaced(error)
        self._failed += self.failing(made, error)
        self._send(self.unfinished.begin_again(alone=made.alone, suspects=self.suspects))

    def _send(self, requests: list[Any]) -> None:
        try:
            for request in requests:
                self.inner.add_request(request)
        except Exception as error:
            # get_output meets the death and sends all unfinished requests again.
            if not is_core_death(error, self.inner):
                raise


class RestartingAsyncClient(RestartingClient):
    """The restarting client of ``AsyncLLM``. The event loop runs on during a restart."""

    def __init__(self, engine: Any, inner: Any, make_again: RestartCore) -> None:
        super().__init__(engine, inner, make_again)
        self._is_away = False  # between a death and the sending of the unfinished requests

    async def add_request_async(self, request: Any) -> None:
        """Send a request; if the core has died, restart it first."""
        if (not self.unfinished.add(request) or self._is_away) and not self.is_given_up:
            return
        try:
            await self.inner.add_request_async(request)
        except Exception as error:
            # The task that waits for outputs meets the death too, and sends all unfinished
            # requests, this one included.
            if not is_core_death(error, self.inner) or self.is_given_up:
                raise

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort requests."""
        self.unfinished.drop(request_ids)
        await self.inner.abort_requests_async(request_ids)
        await self._send(self.unfinished.next())

    async def get_output_async(self) -> Any:
        """Return the core's next outputs; if the core has died, restart it first."""
        while True:
            try:
                outputs = self.unfinished.take(await self.inner.get_output_async())
            except Exception as error:
                if not is_core_death(error, self.inner):
                    raise
                failed = await self._died(error)
                if failed:
                    return outputs_of(failed)
                continue
            if differing := self.differing():
                await self.inner.abort_requests_async(list(differing))
                outputs.outputs += self.failure_outputs(differing)
            await self._send(self.unfinished.next())
            return outputs

    def fail(self, name: str, error: Exception) -> None:
        """Raise the exception in the caller of this request; all other requests continue."""
        if (engine := self._engine()) is None:
            return
        state = engine.output_processor.request_states.get(name)
        if state is not None and state.queue is not None:
            engine.output_processor.abort_requests([name], internal=True)
            state.queue.put(error)  # instead of the output that reports the abort

    async def _died(self, error: Exception) -> list[Any]:
        self._is_away = True
        try:
            made = await asyncio.to_thread(self.replaced, error)
        except asyncio.CancelledError:
            # Ctrl-C, or the loop ends: the loop joins the thread, and no caller needs the engine.
            self.is_given_up = self._is_closed = True
            raise
        else:
            failed = self.failing(made, error)
            resumed = self.unfinished.begin_again(alone=made.alone, suspects=self.suspects)
        finally:
            self._is_away = False
        await self._send(resumed)
        return failed

    async def _send(self, requests: list[Any]) -> None:
        try:
            for request in requests:
                await self.inner.add_request_async(request)
        except Exception as error:
            if not is_core_death(error, self.inner):
                raise
