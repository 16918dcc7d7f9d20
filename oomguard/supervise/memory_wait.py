"""Wait until the devices are as free as before the failed run: the driver gives memory back with a delay."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from oomguard.observe import nvml

LIMIT_S: Final = 60.0
POLL_S: Final = 0.5
TOLERANCE_RATIO: Final = 0.01


def free_by_device() -> dict[int, int]:
    """Return the free bytes of every device that tells them, by its index."""
    return {d.index: d.free_bytes for d in nvml.devices() or () if d.free_bytes is not None}


def wait_until_free(before: dict[int, int], stop: Callable[[], bool], *, limit_s: float = LIMIT_S) -> str | None:
    """Wait until every device has its earlier free memory back, within 1 %.

    Args:
        before: free bytes by device, as they were.
        stop: asked every ``POLL_S``; once true, waiting ends.
        limit_s: the longest wait.

    Returns what is still held after ``limit_s``, as text; None when all is back, after a stop, or where nothing is known.
    """
    deadline = time.monotonic() + limit_s
    while before and not stop():
        now = free_by_device()
        held = {i: was - now[i] for i, was in before.items() if i in now and now[i] < was * (1 - TOLERANCE_RATIO)}
        if not held:
            return None
        if time.monotonic() > deadline:
            return ", ".join(f"GPU {i}: {size / 2**30:.2f} GiB still held" for i, size in held.items())
        time.sleep(POLL_S)
    return None
