"""What a failed start left: the processes that spoke as its engine's, and the shared memory that they said they made.

Only those. A process of the user's that was started in the same seconds is not touched, and neither is a file in /dev/shm that
nobody named.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from oomguard.engines.vllm.in_process.listening import is_same
from oomguard.log import get_logger

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - where Python puts it
# How the C library names the file of a semaphore there.
_SEMAPHORE: Final = "sem."
# vLLM ends its own processes; this is for those that it leaves.
_ENDS_BY_ITSELF_S: Final = 5.0
_ENDS_AFTER_TERM_S: Final = 3.0
_GONE_AFTER_KILL_S: Final = 2.0


def end_processes(speakers: Mapping[int, int | None]) -> tuple[int, ...]:
    """End the processes that spoke and are still there; return those that even SIGKILL did not end.

    ``speakers`` maps each to the ticks at which it was started, so that another process of its number is left alone.
    """

    def alive() -> tuple[int, ...]:
        _reap()
        return tuple(pid for pid, ticks in speakers.items() if is_same(pid, ticks))

    left = _wait(alive, _ENDS_BY_ITSELF_S)
    for number, wait_s in ((signal.SIGTERM, _ENDS_AFTER_TERM_S), (signal.SIGKILL, _GONE_AFTER_KILL_S)):
        if left:
            get_logger().info("ending what the failed start left", processes=list(left), signal=number.name)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        left = _wait(alive, wait_s) if left else ()
    return left


def remove_segments(names: Iterable[str], folder: Path = FOLDER) -> tuple[str, ...]:
    """Remove the shared memory of these names that is still there; return the names that were."""
    removed = []
    for name in dict.fromkeys(names):
        if not name or "/" in name:
            continue
        try:
            (folder / name).unlink()
        except OSError:
            continue
        removed.append(name)
        _forget(name)
    return tuple(removed)


def _forget(name: str) -> None:
    """Tell Python's resource tracker, which the processes share, that it has nothing to remove: it would warn at the end."""
    from multiprocessing import resource_tracker

    kind = "semaphore" if name.startswith(_SEMAPHORE) else "shared_memory"
    with contextlib.suppress(Exception):
        resource_tracker.unregister(f"/{name.removeprefix(_SEMAPHORE)}", kind)


def _reap() -> None:
    """Collect children of multiprocessing that have ended."""
    from multiprocessing import active_children

    active_children()


def _wait(alive: Callable[[], tuple[int, ...]], seconds: float) -> tuple[int, ...]:
    until_s = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return left
