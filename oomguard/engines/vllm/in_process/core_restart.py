"""An engine at work whose core may die: its front end is given a client that has the core made
again and sends what is unfinished.

The client stands where the front end (``LLMEngine``, ``AsyncLLM``) keeps its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from oomguard.engines.vllm.in_process.core_client import (
    AfterDeath,
    LastingClient,
    death_of,
    is_death,
    outputs_of,
)


def may_attend(engine: Any) -> bool:
    """Return whether an engine's core is another process with a client of its own: not with data
    parallelism, nor in this process.
    """
    client = getattr(engine, "engine_core", None)
    needed = ("resources", "outputs_queue", "add_request")
    is_one = type(client).__name__ in {"SyncMPClient", "AsyncMPClient"} and not getattr(
        client, "is_dp", False
    )
    return is_one and all(hasattr(client, name) for name in needed)


def attend(engine: Any, make_again: AfterDeath) -> None:
    """Put a client in the place of the engine's own that outlives its core."""
    client = engine.engine_core
    if type(client).__name__ == "SyncMPClient":
        engine.engine_core = AttendedSync(engine, client, make_again)
        return
    engine.engine_core = AttendedAsync(engine, client, make_again)
    handler = getattr(engine, "output_handler", None)
    if handler is not None:  # it was given the engine's own client
        handler.cancel()
        engine.output_handler = None
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            engine._run_output_handler()


class AttendedSync(LastingClient):
    """The client of ``LLMEngine``."""

    def __init__(self, engine: Any, inner: Any, make_again: AfterDeath) -> None:
        super().__init__(engine, inner, make_again)
        self._failed: list[Any] = []
        self._raised_last: Exception | None = None

    def add_request(self, request: Any) -> None:
        """Send a request, to a new core where this one has died."""
        if not self.unfinished.add(request) and not self.is_given_up:
            return
        try:
            self.inner.add_request(request)
        except Exception as error:  # noqa: BLE001 - raised again unless the core is made again
            self._died(error)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Give up requests."""
        self.unfinished.drop(request_ids)
        self.inner.abort_requests(request_ids)
        self._send(self.unfinished.next())

    def get_output(self) -> Any:
        """Return what the core gives next, from a new core where this one has died."""
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
            except Exception as error:  # noqa: BLE001 - as above
                self._died(error)
                continue
            if differing := self.differing():
                self.inner.abort_requests(list(differing))
                self._failed += self.told(differing)
            self._send(self.unfinished.next())
            return outputs

    def fail(self, name: str, error: Exception) -> None:
        """Have the exception raised once all other requests are done: there is no other way to tell
        of a vector that failed.
        """
        del name
        self._raised_last = self._raised_last or error

    def _died(self, error: Exception) -> None:
        if not is_death(error, self.inner):
            raise error
        error = death_of(error)
        made = self.replaced(error)
        self._failed += self.failing(made, error)
        self._send(self.unfinished.begin_again(alone=made.alone, suspects=self.suspects))

    def _send(self, requests: list[Any]) -> None:
        try:
            for request in requests:
                self.inner.add_request(request)
        except Exception as error:
            if not is_death(
                error, self.inner
            ):  # a death is met where outputs are waited for, with all that is unfinished
                raise


class AttendedAsync(LastingClient):
    """The client of ``AsyncLLM``. While the core is made again the event loop goes on."""

    def __init__(self, engine: Any, inner: Any, make_again: AfterDeath) -> None:
        super().__init__(engine, inner, make_again)
        self._is_away = False  # between a death and the sending of what is unfinished

    async def add_request_async(self, request: Any) -> None:
        """Send a request, to a new core where this one has died."""
        if (not self.unfinished.add(request) or self._is_away) and not self.is_given_up:
            return
        try:
            await self.inner.add_request_async(request)
        except Exception as error:
            # Who waits for outputs hears of the death too, and sends what is unfinished: this
            # request as well.
            if not is_death(error, self.inner) or self.is_given_up:
                raise

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Give up requests."""
        self.unfinished.drop(request_ids)
        await self.inner.abort_requests_async(request_ids)
        await self._send(self.unfinished.next())

    async def get_output_async(self) -> Any:
        """Return what the core gives next, from a new core where this one has died."""
        while True:
            try:
                outputs = self.unfinished.take(await self.inner.get_output_async())
            except Exception as error:
                if not is_death(error, self.inner):
                    raise
                failed = await self._died(error)
                if failed:
                    return outputs_of(failed)
                continue
            if differing := self.differing():
                await self.inner.abort_requests_async(list(differing))
                outputs.outputs += self.told(differing)
            await self._send(self.unfinished.next())
            return outputs

    def fail(self, name: str, error: Exception) -> None:
        """Have the one who waits for this request get the exception; all others go on."""
        if (engine := self._engine()) is None:
            return
        state = engine.output_processor.request_states.get(name)
        if state is not None and state.queue is not None:
            engine.output_processor.abort_requests([name], internal=True)
            state.queue.put(error)  # in the place of the output that tells of the abort

    async def _died(self, error: Exception) -> list[Any]:
        self._is_away = True
        try:
            made = await asyncio.to_thread(self.replaced, error)
        except asyncio.CancelledError:
            # Ctrl-C, or a loop that ends: it waits for the thread, and nobody waits for the engine.
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
            if not is_death(error, self.inner):
                raise
