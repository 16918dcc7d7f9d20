"""Wait until devices are as free as before the failed attempt; the driver frees memory late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from oomguard.core.facts import format_gib
from oomguard.core.log import get_logger
from oomguard.probe import nvml
from oomguard.probe.nvml import Device

LIMIT_S: Final = 60.0
POLL_S: Final = 0.5
# Drivers usually free memory within a second; a longer wait needs an explanation.
ANNOUNCE_AFTER_S: Final = 2.0
TOLERANCE_RATIO: Final = 0.01


def devices_by_index() -> dict[int, Device]:
    """Return the devices with known free memory, by index."""
    return {d.index: d for d in nvml.devices() or () if d.free_bytes is not None}


def wait_until_free(
    before: Mapping[int, Device],
    stop: Callable[[], bool],
    *,
    limit_s: float = LIMIT_S,
    host_pids: bool | None = None,
) -> str | None:
    """Wait until every device has its earlier free memory again, within 1%.

    Args:
        before: the devices before the attempt.
        stop: checked every ``POLL_S`` seconds; waiting ends once it returns true.
        limit_s: the longest wait in seconds.
        host_pids: whether process ids here are those that NVML shows; None: ask the kernel.

    Returns:
        What is still used after ``limit_s`` and by which processes, as text. None if all memory is
        free again, after a stop, or if nothing is known.
    """
    began = time.monotonic()
    deadline = began + limit_s
    is_announced = False
    while before and not stop():
        now = devices_by_index()
        held = {}
        for index, was in before.items():
            size = _held_bytes(was, now.get(index))
            if size is not None:
                held[index] = size
        if not held:
            return None
        if not is_announced and time.monotonic() - began > ANNOUNCE_AFTER_S:
            is_announced = True
            get_logger().info(
                "Waiting until the GPUs are as free as before the attempt",
                still_held=", ".join(f"GPU {i}: {format_gib(size)}" for i, size in held.items()),
                at_most_s=round(limit_s),
            )
        if time.monotonic() > deadline:
            from oomguard.probe.processes import sees_host_pids

            if host_pids is None:
                is_host_pid = sees_host_pids()
            else:
                is_host_pid = host_pids
            return "; ".join(
                f"GPU {i}: {format_gib(size)} still held, "
                f"{_holders(before[i], now[i], is_host_pid=is_host_pid)}"
                for i, size in held.items()
            )
        time.sleep(POLL_S)
    return None


def _held_bytes(was: Device, now: Device | None) -> int | None:
    """Return the bytes that were not freed; None if all were, or if nothing is known."""
    if now is None or now.free_bytes is None or was.free_bytes is None:
        return None
    if now.free_bytes < was.free_bytes * (1 - TOLERANCE_RATIO):
        return was.free_bytes - now.free_bytes
    return None


def _holders(was: Device, now: Device, *, is_host_pid: bool | None) -> str:
    """Return the processes that use more of a device than before, largest first."""
    if now.used_bytes_by_pid is None:
        return "by processes that the driver does not show"
    before = was.used_bytes_by_pid or {}
    grown = {
        pid: (size, (size or 0) - (before.get(pid) or 0))
        for pid, size in now.used_bytes_by_pid.items()
    }
    grown = {pid: sizes for pid, sizes in grown.items() if sizes[1] > 0 or pid not in before}
    if not grown:
        return "by no process that the driver shows"
    if not is_host_pid:
        if len(grown) > 1:
            return f"by {len(grown)} processes outside this container's view"
        return "by a process outside this container's view"
    from oomguard.core.presentable import process_list

    by_growth = sorted(grown, key=lambda pid: -grown[pid][1])
    return f"by {process_list(by_growth, lambda pid: _has(grown[pid][0]))}"


def _has(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    return f" with {format_gib(size_bytes)}"
