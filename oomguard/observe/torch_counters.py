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

_OF_SIMULATED: Final = Counter(SIMULATED, ALLOCATED)
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


def _cuda() -> Any:
    """Return torch's CUDA; None before it is in use."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _cuda_stats(cuda: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the statistics of each CUDA device that this process has had memory of."""
    for index in range(cuda.device_count()):
        stats = None
        with contextlib.suppress(RuntimeError):  # after an error of its own CUDA tells nothing any more
            stats = cuda.memory_stats_as_nested_dict(index)
        if stats and stats["reserved_bytes"]["all"]["allocated"]:  # ever, whatever was given back or measured anew
            yield index, stats


def now() -> dict[Counter, int]:
    """Return what torch has allocated and reserved; nothing on a machine where it works on the processor."""
    if (device := _simulated()) is not None:
        return {_OF_SIMULATED: int(device.live_bytes)}
    cuda = _cuda()
    return {} if cuda is None else {key: current for key, current, _ in _cuda_counters(cuda)}


def simulated_limits() -> dict[Counter, int]:
    """Return what the simulated device has; empty without one."""
    device = _simulated()
    return {} if device is None else {_OF_SIMULATED: int(device.capacity_bytes)}


def limits() -> dict[Counter, int]:
    """Return what each device has for torch."""
    if found := simulated_limits():
        return found
    cuda = _cuda()
    for index, _ in () if cuda is None else _cuda_stats(cuda):
        total = int(cuda.get_device_properties(index).total_memory)
        with contextlib.suppress(AttributeError):  # since torch 2.9
            total = min(total, int(total * cuda.get_per_process_memory_fraction(index)))
        found |= {Counter(f"cuda:{index}", what): total for what in (ALLOCATED, RESERVED)}
    return found


def _cuda_counters(cuda: Any) -> Iterator[tuple[Counter, int, int]]:
    """Yield each counter of CUDA's with its value now and its peak."""
    for index, stats in _cuda_stats(cuda):
        for what in (ALLOCATED, RESERVED):
            counts = stats[f"{what}_bytes"]["all"]
            yield Counter(f"cuda:{index}", what), int(counts["current"]), int(counts["peak"])


class Peaks:
    """The largest values since it was made, until ``end``; ``bytes`` holds them by counter."""

    def __init__(self) -> None:
        self.bytes: dict[Counter, int] = {}
        self._meters: list[tuple[Any, Any]] = []
        with _lock:
            if (cuda := _cuda()) is not None:
                _note()
                for index, _ in _cuda_stats(cuda):
                    cuda.reset_peak_memory_stats(index)
            _open.append(self)
        if (device := _simulated()) is not None:
            self._meters.append((device, device.begin_meter()))

    def take(self, values: Mapping[Counter, int]) -> None:
        """Take what the counters showed at one moment, and ``follow``."""
        for key, value in values.items():
            self._rise_to(key, value)
        self.follow()

    def follow(self) -> None:
        """Measure also a simulated device that was entered since."""
        device = _simulated()
        if device is None:
            return
        for known, _ in self._meters:
            if known is device:
                return
        meter = device.begin_meter()
        # It was entered after this began, and all that it counted is in it.
        meter.peak_bytes = max(meter.peak_bytes, device.peak_bytes)
        self._meters.append((device, meter))

    def so_far(self) -> dict[Counter, int]:
        """Return the largest values until now."""
        _note()
        for _, meter in self._meters:
            self._rise_to(_OF_SIMULATED, int(meter.peak_bytes))
        return self.bytes

    def end(self) -> dict[Counter, int]:
        """Measure no longer; return the largest values."""
        with _lock:
            self.so_far()
            if self in _open:
                _open.remove(self)
        for device, meter in self._meters:
            device.end_meter(meter)
        self._meters.clear()
        return self.bytes

    def _rise_to(self, key: Counter, value: int) -> None:
        self.bytes[key] = max(value, self.bytes.get(key, 0))


def _note() -> None:
    """Note CUDA's peaks so far for all who measure."""
    with _lock:
        cuda = _cuda() if _open else None
        for key, _, peak in () if cuda is None else _cuda_counters(cuda):
            for measured in _open:
                measured._rise_to(key, peak)


torch_memory.before_reset.append(_note)
