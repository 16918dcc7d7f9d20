"""An engine that sleeps (vLLM's sleep mode) and is to wake: the memory that it gave up must be free, else its core dies of it.

Its workers told how much each of them gave up; the driver tells what is free now, on the device that it has each of them on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from oomguard.errors import WakeUpError
from oomguard.facts import format_gib
from oomguard.observe.nvml import Device, devices

# vllm/v1/worker/gpu_worker.py, sleep; GiB with two decimals.
FREED: Final = re.compile(r"Sleep mode freed ([\d.]+) GiB memory")
_ROUNDED_BYTES: Final = 2**30 // 200


def freed_bytes(rows: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Return what each worker gave up when it was last put to sleep, by process id, as little as its rounded words allow."""
    found: dict[int, int] = {}
    for row in rows:
        text, pid = row.get("text"), row.get("pid")
        if isinstance(text, str) and isinstance(pid, int) and (told := FREED.search(text)) is not None:
            found[pid] = max(0, round(float(told[1]) * 2**30) - _ROUNDED_BYTES)
    return found


def check_room(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise WakeUpError where a device has less free than the engine's workers gave up on it.

    Nothing is checked of a worker that the driver does not show: in a container that hides processes, or without NVML.
    """
    freed = freed_bytes(rows)
    for device in devices() or () if freed else ():
        by_pid = device.used_bytes_by_pid or {}
        needed = sum(size for pid, size in freed.items() if pid in by_pid)
        if device.free_bytes is not None and needed > device.free_bytes:
            raise WakeUpError(
                f"the engine is not woken: it needs {format_gib(needed)} of GPU {device.index}, {format_gib(device.free_bytes)} is free"
                f"{_holders(device, freed)}",
                hint="It still sleeps. End what holds the memory, or put that to sleep, and wake it up again.",
            )


def _holders(device: Device, own: Mapping[int, int]) -> str:
    """Return the other processes on a device, the largest first."""
    others = {pid: size or 0 for pid, size in (device.used_bytes_by_pid or {}).items() if pid not in own}
    largest = sorted(others, key=lambda pid: -others[pid])[:4]
    told = ", ".join(
        f"process {pid} with {format_gib(others[pid])}" if others[pid] else f"process {pid}" for pid in largest
    )
    return f"; held by {told}" if told else ""
