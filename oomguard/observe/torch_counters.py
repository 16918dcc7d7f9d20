"""Torch's counters of every device that it works on, and their peaks since several moments at once.

CUDA's allocator knows one peak: it is measured anew at each of these moments, and noted first for those that were before. That of
a user who reads ``torch.cuda.max_memory_allocated`` begins anew too. The simulated device counts each peak by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomguard.observe import torch_memory
from oomguard.timeline import ALLOCATED, RESERVED, SIMULATED, Counter

_open: Final[list[Peaks]] = []
_lock = threading.RLock()


def _renew_lock() -> None:
    """In a fork of this process nobody may be left to release it."""
    global _lock  # noqa: PLW0603 - of this process
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _simulated() -> Any:
    testing = sys.modules.get("oomguard.testing")
    return None if testing is None else testing.active_device()


def _cuda_stats() -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the statistics of each CUDA device that this process has had memory of; none before CUDA is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        stats = None
        with contextlib.suppress(RuntimeError):  # after an error of its own CUDA tells nothing any more
            stats = torch.cuda.memory_stats_as_nested_dict(index)
        if stats and stats["reserved_bytes"]["all"]["allocated"]:  # ever, whatever was given back or measured anew
            yield index, stats


def now() -> dict[Counter, int]:
    """Return what torch has allocated and reserved; nothing on a machine where it works on the processor."""
    if (device := _simulated()) is not None:
        return {Counter(SIMULATED, ALLOCATED): int(device.live_bytes)}
    return {key: current for key, current, _ in _cuda_counters()}


def limits() -> dict[Counter, int]:
    """Return what each device has for torch."""
    if (device := _simulated()) is not None:
        return {Counter(SIMULATED, ALLOCATED): int(device.capacity_bytes)}
    found: dict[Counter, int] = {}
    for index, _ in _cuda_stats():
        cuda = sys.modules["torch"].cuda
        total = int(cuda.get_device_properties(index).total_memory)
        with contextlib.suppress(AttributeError):  # since torch 2.9
            total = min(total, int(total * cuda.get_per_process_memory_fraction(index)))
        found |= {Counter(f"cuda:{index}", what): total for what in (ALLOCATED, RESERVED)}
    return found


def _cuda_counters() -> Iterator[tuple[Counter, int, int]]:
    """Yield each counter of CUDA's with its value now and its peak."""
    for index, stats in _cuda_stats():
        for what in (ALLOCATED, RESERVED):
            counts = stats[f"{what}_bytes"]["all"]
            yield Counter(f"cuda:{index}", what), int(counts["current"]), int(counts["peak"])


class Peaks:
    """The largest values since it was made, until ``end``; ``bytes`` holds them by counter."""

    def __init__(self) -> None:
        self.bytes: dict[Counter, int] = {}
        self._meters: list[tuple[Any, Any]] = []
        with _lock:
            _note()
            _reset()
            _open.append(self)
        if (device := _simulated()) is not None:
            self._meters.append((device, device.begin_meter()))

    def take(self, values: Mapping[Counter, int]) -> None:
        """Take what the counters showed at one moment; follow a simulated device that was entered since."""
        for key, value in values.items():
            self._rise_to(key, value)
        device = _simulated()
        if device is not None and all(device is not known for known, _ in self._meters):
            meter = device.begin_meter()
            # It was entered after this began, and all that it counted is in it.
            meter.peak_bytes = max(meter.peak_bytes, device.peak_bytes)
            self._meters.append((device, meter))

    def so_far(self) -> dict[Counter, int]:
        """Return the largest values until now."""
        _note()
        for _, meter in self._meters:
            self._rise_to(Counter(SIMULATED, ALLOCATED), int(meter.peak_bytes))
        return self.bytes

    def end(self) -> dict[Counter, int]:
        """Measure no longer; return the largest values."""
        with _lock:
            self.so_far()
            _open[:] = [other for other in _open if other is not self]
        for device, meter in self._meters:
            device.end_meter(meter)
        self._meters.clear()
        return self.bytes

    def _rise_to(self, key: Counter, value: int) -> None:
        self.bytes[key] = max(value, self.bytes.get(key, 0))


def _note() -> None:
    """Note CUDA's peaks so far for all who measure."""
    with _lock:
        peaks = {key: peak for key, _, peak in _cuda_counters()} if _open else {}
        for measured in _open:
            for key, peak in peaks.items():
                measured._rise_to(key, peak)


def _reset() -> None:
    for index, _ in _cuda_stats():
        sys.modules["torch"].cuda.reset_peak_memory_stats(index)


torch_memory.before_reset.append(_note)
