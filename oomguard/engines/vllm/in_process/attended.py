"""An engine at work whose core may die: its front end keeps a client that has the core made again and sends what is unfinished.

The client stands where the front end (``LLMEngine``, ``AsyncLLM``) keeps its own. It sees every request and every output, so all
that goes through an engine goes through it: generate, chat, embed, score, beam search, streams. The front end never sees the death.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any, Final

from oomguard.engines.vllm.in_process.unfinished import Unfinished
from oomguard.engines.watched_start import MadeAgain
from oomguard.log import get_logger
from oomguard.observe.host import Cgroup, read_cgroup

# A core that is gone without a word: vLLM notices it, and leaves its caller at an empty queue.
_LOOKS_EVERY_S: Final = 0.25
_EMPTY_FOR_S: Final = 1.0
# A failure for memory happens again to the same request; any other death may have been chance.
_DEATHS_OF_MEMORY, _DEATHS_OF_CHANCE = 1, 2


# What is asked after a death: whether anything had come since the last one. None: it is not made again.
MakeAgain = Callable[[Exception, "AttendedClient"], MadeAgain | None]


def may_attend(engine: Any) -> bool:
    """Return whether an engine's core is another process with a client of its own: not with data parallelism, nor in this process."""
    client = getattr(engine, "engine_core", None)
    needed = ("resources", "outputs_queue", "add_request")
    return type(client).__name__ in {"SyncMPClient", "AsyncMPClient"} and all(hasattr(client, name) for name in needed)


def attend(engine: Any, make_again: MakeAgain) -> None:
    """Put a client in the place of the engine's own that outlives its core."""
    client = engine.engine_core
    if type(client).__name__ == "SyncMPClient":
        engine.engine_core = AttendedSync(client, make_again)
        return
    engine.engine_core = AttendedAsync(client, make_again)
    handler = getattr(engine, "output_handler", None)
    if handler is not None:  # it was given the engine's own client; the next call makes another one
        handler.cancel()
        engine.output_handler = None


class AttendedClient:
    """What the synchronous and the asynchronous client share: everything but requests and outputs is the inner client's.

    Attributes:
        unfinished: the requests that are not finished.
        before: the cgroup's count of kills while the core was last seen alive.
        suspects: the requests of the step at which the core died, where it said so.
    """

    def __init__(self, inner: Any, make_again: MakeAgain) -> None:
        self._inner, self._make_again = inner, make_again
        self._is_given_up = False
        self._failed: list[Any] = []
        self.unfinished = Unfinished()
        self.before: Cgroup | None = None
        self.suspects: Collection[str] = ()
        self._watch()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while it is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def resources(self) -> Any:
        """The inner client's, which are not dead while the core is made again: nobody is to give up meanwhile."""
        return _Resources(self._inner.resources, self._is_given_up)

    def _watch(self) -> None:
        self.before = read_cgroup()
        threading.Thread(target=_wake, args=(weakref.ref(self),), name="oomguard-waker", daemon=True).start()

    def _replaced(self, error: Exception) -> MadeAgain:
        """Make the core again in the place of the dead one; raises the error that told of its death where that is not to be."""
        made = None
        try:
            made = self._make_again(error, self)
        finally:
            self._is_given_up = made is None
        if made is None:
            raise error
        self._inner, made.engine.engine_core = made.engine.engine_core, None
        self._watch()
        return made

    def _failing(self, made: MadeAgain) -> list[Any]:
        """Return the outputs that end the requests which cannot go on, with the reason."""
        failed = dict.fromkeys(self.unfinished.lost(), "drawn without a seed, within a grammar: it cannot go on")
        if (name := self.unfinished.at_fault(_DEATHS_OF_MEMORY if made.of_memory else _DEATHS_OF_CHANCE)) is not None:
            failed[name] = "the engine died of this request while it ran alone"
        for name, why in failed.items():
            get_logger().warning("a request failed", request=name, because=why)
        self.unfinished.drop(failed)
        return [_failed_output(name, why) for name, why in failed.items()]


class AttendedSync(AttendedClient):
    """The client of ``LLMEngine``."""

    def add_request(self, request: Any) -> None:
        """Send a request, to a new core where this one has died."""
        if not self.unfinished.add(request):
            return
        try:
            self._inner.add_request(request)
        except Exception as error:  # noqa: BLE001 - raised again unless the core is made again
            self._died(error)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Give up requests."""
        self.unfinished.drop(request_ids)
        self._inner.abort_requests(request_ids)
        self._send(self.unfinished.next())

    def get_output(self) -> Any:
        """Return what the core gives next, from a new core where this one has died."""
        while True:
            if self._failed:
                failed, self._failed = self._failed, []
                return _outputs_of(failed)
            try:
                outputs = self.unfinished.take(self._inner.get_output())
            except Exception as error:  # noqa: BLE001 - as above
                self._died(error)
                continue
            self._send(self.unfinished.next())
            return outputs

    def _died(self, error: Exception) -> None:
        if not _is_death(error):
            raise error
        made = self._replaced(error)
        self._failed += self._failing(made)
        self._send(self.unfinished.begin_again(alone=made.alone, suspects=self.suspects))

    def _send(self, requests: list[Any]) -> None:
        try:
            for request in requests:
                self._inner.add_request(request)
        except Exception as error:
            if not _is_death(error):  # a death is met where outputs are waited for, with all that is unfinished
                raise


class AttendedAsync(AttendedClient):
    """The client of ``AsyncLLM``. While the core is made again the event loop goes on."""

    def __init__(self, inner: Any, make_again: MakeAgain) -> None:
        self._is_away = False  # between a death and the sending of what is unfinished
        super().__init__(inner, make_again)

    async def add_request_async(self, request: Any) -> None:
        """Send a request, to a new core where this one has died."""
        if not self.unfinished.add(request) or self._is_away:
            return
        try:
            await self._inner.add_request_async(request)
        except Exception as error:
            # Who waits for outputs hears of the death too, and sends what is unfinished: this request as well.
            if not _is_death(error) or self._is_given_up:
                raise

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Give up requests."""
        self.unfinished.drop(request_ids)
        await self._inner.abort_requests_async(request_ids)
        await self._send(self.unfinished.next())

    async def get_output_async(self) -> Any:
        """Return what the core gives next, from a new core where this one has died."""
        while True:
            try:
                outputs = self.unfinished.take(await self._inner.get_output_async())
            except Exception as error:
                if not _is_death(error):
                    raise
                self._is_away = True
                made = await asyncio.to_thread(self._replaced, error)
                failed = self._failing(made)
                resumed = self.unfinished.begin_again(alone=made.alone, suspects=self.suspects)
                self._is_away = False
                await self._send(resumed)
                if failed:
                    return _outputs_of(failed)
                continue
            await self._send(self.unfinished.next())
            return outputs

    async def _send(self, requests: list[Any]) -> None:
        try:
            for request in requests:
                await self._inner.add_request_async(request)
        except Exception as error:
            if not _is_death(error):
                raise


class _Resources:
    """A client's resources, dead only once the core is not made again."""

    def __init__(self, inner: Any, is_given_up: bool) -> None:
        self._resources, self.engine_dead = inner, inner.engine_dead and is_given_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resources, name)

    def __call__(self) -> Any:
        return self._resources()


def _is_death(error: Exception) -> bool:
    return type(error).__name__ == "EngineDeadError"


def _wake(attended: weakref.ref[AttendedClient]) -> None:
    """Watch one core until it dies, and wake the synchronous caller whom vLLM leaves at an empty queue."""
    client = attended()
    inner = None if client is None else weakref.ref(client._inner)
    del client
    empty_since_s: float | None = None
    while True:
        time.sleep(_LOOKS_EVERY_S)
        client, own = attended(), None if inner is None else inner()
        if client is None or own is None or client._inner is not own:
            return
        if not own.resources.engine_dead:
            client.before = read_cgroup() or client.before
        elif isinstance(client, AttendedAsync):
            return  # its task of outputs is cancelled, which wakes it
        elif client._is_given_up:
            return
        elif not own.outputs_queue.empty():
            empty_since_s = None
        else:
            empty_since_s = empty_since_s or time.monotonic()
            if time.monotonic() - empty_since_s >= _EMPTY_FOR_S:
                own.outputs_queue.put_nowait(_death())
                return
        del client, own


def _death() -> Exception:
    from vllm.v1.engine.exceptions import EngineDeadError

    error: Exception = EngineDeadError()
    return error


def _failed_output(name: str, why: str) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    return EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason=why)


def _outputs_of(outputs: list[Any]) -> Any:
    from vllm.v1.engine import EngineCoreOutputs

    return EngineCoreOutputs(outputs=outputs)
