"""A start that will not end: a core that failed and waits for a worker that never hears it, or one
that takes too long or is given up.

vLLM's core asks its workers to end by a signal, which a worker can lose, and then waits for them
without a limit; so does the front end for the core. Ended here are only the processes of this
start, its workers first: then the core ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Final

from oomguard.core.log import get_logger
from oomguard.engines.vllm.in_process.message_receiver import Listener, is_same

LOOKS_EVERY_S: Final = 0.5
# vLLM's processes end within 5 seconds of a failure where nothing is lost.
ENDS_WITHIN_S: Final = 20.0
_CORE_FOLLOWS_WITHIN_S: Final = 5.0
GIVEN_UP: Final = "nobody waits for it any more, and it was ended"
# How vLLM names a core's process (vllm/v1/engine/utils.py CoreEngineProcManager, 0.10 to 0.32).
_CORE: Final = "EngineCore"


class Watched:
    """A start that is watched while it lasts.

    Args:
        listener: hears the start's processes.
        within_s: the seconds that it may take; None: any.
        is_given_up: whether nobody waits for it any more.

    Attributes:
        ended_because: why it was ended before it had started; None where it was not.
    """

    def __init__(
        self,
        listener: Listener,
        within_s: float | None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._listener = listener
        self._within_s = within_s
        self._is_given_up = is_given_up
        self._before = set(active_children())
        self._over = threading.Event()
        self._began_s = time.monotonic()
        self.ended_because: str | None = None

    @contextlib.contextmanager
    def lasting(self) -> Iterator[Watched]:
        """Watch in a thread until the block ends."""
        thread = threading.Thread(target=self._watch, name="oomguard-start-watch", daemon=True)
        with contextlib.suppress(
            RuntimeError
        ):  # no more threads can be started: then it is not watched
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            if thread.ident is not None:
                thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOKS_EVERY_S):
            now_s = time.monotonic()
            failed = self._listener.failed
            stuck = {
                pid
                for pid, at_s in failed.items()
                if now_s - at_s > ENDS_WITHIN_S and self._is_alive(pid)
            }
            late = self._within_s is not None and now_s - self._began_s > self._within_s
            if stuck:
                get_logger().warning("the engine failed and does not end", processes=sorted(stuck))
                self._end_all(spared=stuck)
                return
            if self.ended_because is None and (late or self._is_given_up()):
                too_long = f"it had not started within {self._within_s or 0:g} s, and was ended"
                if late:
                    self.ended_because = too_long
                else:
                    self.ended_because = GIVEN_UP
                get_logger().warning("the engine's start is ended", because=self.ended_because)
            if (
                self.ended_because is not None
            ):  # each time: one that is killed may have begun another
                self._end_all(spared=set())

    def _end_all(self, spared: set[int]) -> None:
        """Kill the start's processes; those ``spared`` only where they do not follow."""
        self._kill(set(self._listener.speakers) - spared)
        for process in self._new_cores():
            if process.pid not in spared:
                with contextlib.suppress(ValueError):  # closed meanwhile
                    process.kill()
        until_s = time.monotonic() + _CORE_FOLLOWS_WITHIN_S
        while (
            any(map(self._is_alive, spared))
            and time.monotonic() < until_s
            and not self._over.wait(0.05)
        ):
            pass
        self._kill(set(self._listener.speakers))

    def _new_cores(self) -> list[BaseProcess]:
        """Return the cores that were begun since: one says its first word seconds later, once it
        has imported the engine.
        """
        with contextlib.suppress(RuntimeError):  # another thread has just begun a process
            return [
                p for p in active_children() if p not in self._before and p.name.startswith(_CORE)
            ]
        return []

    def _kill(self, pids: set[int]) -> None:
        for pid in filter(self._is_alive, pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _is_alive(self, pid: int) -> bool:
        return is_same(pid, self._listener.speakers.get(pid))
