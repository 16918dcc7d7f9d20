"""Wait until the devices are as free as before the failed attempt: the driver gives memory back
with a delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from oomguard.core.facts import format_gib
from oomguard.probe import nvml
from oomguard.probe.nvml import Device

LIMIT_S: Final = 60.0
POLL_S: Final = 0.5
TOLERANCE_RATIO: Final = 0.01


def devices_by_index() -> dict[int, Device]:
    """Return every device that tells its free memory, by its index."""
    return {d.index: d for d in nvml.devices() or () if d.free_bytes is not None}


def wait_until_free(
    before: Mapping[int, Device],
    stop: Callable[[], bool],
    *,
    limit_s: float = LIMIT_S,
    host_pids: bool | None = None,
) -> str | None:
    """Wait until every device has its earlier free memory back, within 1 %.

    Args:
        before: the devices as they were.
        stop: asked every ``POLL_S``; once true, waiting ends.
        limit_s: the longest wait.
        host_pids: whether process ids here are the host's, which NVML tells; None asks the kernel.

    Returns what is still held after ``limit_s`` and by whom, as text; None when all is back, after
    a stop, or where nothing is known.
    """
    deadline = time.monotonic() + limit_s
    while before and not stop():
        now = devices_by_index()
        held = {
            i: size
            for i, was in before.items()
            if (size := _held_bytes(was, now.get(i))) is not None
        }
        if not held:
            return None
        if time.monotonic() > deadline:
            from oomguard.probe.processes import sees_host_pids

            if host_pids is None:
                is_told = sees_host_pids()
            else:
                is_told = host_pids
            return "; ".join(
                f"GPU {i}: {format_gib(size)} still held, "
                f"{_holders(before[i], now[i], is_told=is_told)}"
                for i, size in held.items()
            )
        time.sleep(POLL_S)
    return None


def _held_bytes(was: Device, now: Device | None) -> int | None:
    """Return the bytes that did not come back, None where they did, or nothing tells."""
    if now is None or now.free_bytes is None or was.free_bytes is None:
        return None
    if now.free_bytes < was.free_bytes * (1 - TOLERANCE_RATIO):
        return was.free_bytes - now.free_bytes
    return None


def _holders(was: Device, now: Device, *, is_told: bool | None) -> str:
    """Return the processes that hold more of a device than before, the largest first."""
    if now.used_bytes_by_pid is None:
        return "by whom the driver does not tell"
    before = was.used_bytes_by_pid or {}
    grown = {
        pid: (size, (size or 0) - (before.get(pid) or 0))
        for pid, size in now.used_bytes_by_pid.items()
    }
    grown = {pid: sizes for pid, sizes in grown.items() if sizes[1] > 0 or pid not in before}
    if not grown:
        return "by no process that the driver shows"
    if not is_told:
        if len(grown) > 1:
            return f"by {len(grown)} processes outside this container's view"
        return "by a process outside this container's view"
    from oomguard.report.presentable import process_list

    by_growth = sorted(grown, key=lambda pid: -grown[pid][1])
    return f"by {process_list(by_growth, lambda pid: _has(grown[pid][0]))}"


def _has(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    return f" with {format_gib(size_bytes)}"
