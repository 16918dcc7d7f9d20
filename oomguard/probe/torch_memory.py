"""Measure live and peak bytes of torch's device: the simulated device, or CUDA.

None means that neither is in use. The first part counts live tensor storages itself; fake tensors
count like real ones. It does not import torch: every object with an ``untyped_storage`` is a tensor
here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from oomguard.core.measurements import ALLOCATED, RESERVED, SIMULATED, Counter

# The tensors that a sparse tensor consists of.
_PARTS: Final = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


class PeakMeter:
    """Hold a separate peak, which a reset of the device's own peak does not change."""

    __slots__ = ("peak_bytes",)

    def __init__(self, live_bytes: int) -> None:
        self.peak_bytes = live_bytes


class LiveStorages:
    """Count the bytes of adopted storages that are still alive, each storage once.

    With ``keep_events``, every change is recorded as (storage number, bytes): a new size, or 0 at
    its end.
    """

    def __init__(self, *, keep_events: bool = False) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self.events: list[tuple[int, int]] | None = [] if keep_events else None
        self._sizes: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._numbers = 0
        self._meters: list[PeakMeter] = []
        # No peak is lower, so an operation that leaves fewer bytes alive changes none. This saves
        # most comparisons.
        self._lowest_peak_bytes = 0

    def adopt(self, leaf: Any) -> None:
        """Count the tensor's storage from now on until nothing refers to it; ignore other objects.

        ``peak_bytes`` is not updated. Call ``note_peak`` after all results of an operation are
        adopted.
        """
        if getattr(leaf, "untyped_storage", None) is None or leaf.is_meta:
            return
        try:
            storage = leaf.untyped_storage()
        except NotImplementedError:  # a sparse tensor has no storage, but its parts have
            for part in _parts(leaf):
                self.adopt(part)
            return
        key = storage._cdata
        size = storage.nbytes()
        number, known = self._sizes.get(key, (0, 0))
        if number == 0:
            self._numbers += 1
            number = self._numbers
            self._ends[key] = weakref.ref(storage, functools.partial(self._end, key))
        elif known == size:
            return
        self._sizes[key] = (number, size)
        self.bytes += size - known
        if self.events is not None and (size or known):
            self.events.append((number, size))

    def drop(self, leaf: Any) -> None:
        """Stop counting a tensor's storage."""
        key = leaf.untyped_storage()._cdata
        self._ends.pop(key, None)
        self._end(key, None)

    @contextlib.contextmanager
    def passing(self, sizes: Sequence[int]) -> Iterator[None]:
        """Count temporary blocks inside the ``with`` block, also in the peak.

        Negative sizes, which may fail, are ignored.
        """
        needed_bytes = sum(size for size in sizes if size > 0)
        first = self._numbers + 1
        self._numbers += len(sizes)
        self.bytes += needed_bytes
        if self.events is not None:
            self.events += enumerate(sizes, first)
        self.note_peak()
        try:
            yield
        finally:
            self.bytes -= needed_bytes
            if self.events is not None:
                self.events += [(number, 0) for number in range(first, first + len(sizes))]

    def take_events(self) -> list[tuple[int, int]]:
        """Return the recorded changes and forget them."""
        events = self.events
        self.events = []
        return events or []

    def note_peak(self) -> None:
        """Update the peak with the bytes alive now."""
        if self.bytes > self._lowest_peak_bytes:
            self._raise_peaks()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.bytes
        self._lowest_peak_bytes = min(self._lowest_peak_bytes, self.bytes)

    def begin_meter(self) -> PeakMeter:
        """Start measuring another peak, until ``end_meter``."""
        meter = PeakMeter(self.bytes)
        self._meters.append(meter)
        self._lowest_peak_bytes = min(self._lowest_peak_bytes, meter.peak_bytes)
        return meter

    def end_meter(self, meter: PeakMeter) -> None:
        """Stop measuring this peak."""
        with contextlib.suppress(ValueError):
            self._meters.remove(meter)

    def _raise_peaks(self) -> None:
        meters: tuple[PeakMeter, ...] | None = None
        while meters != (
            now := tuple(self._meters)
        ):  # another thread may have started a meter with a lower peak meanwhile
            meters = now
            self.peak_bytes = lowest = max(self.peak_bytes, self.bytes)
            for meter in meters:
                meter.peak_bytes = max(meter.peak_bytes, self.bytes)
                lowest = min(lowest, meter.peak_bytes)
            self._lowest_peak_bytes = lowest

    def _end(self, key: int, _reference: object) -> None:
        number, size = self._sizes.pop(key, (0, 0))
        self._ends.pop(key, None)
        self.bytes -= size
        if self.events is not None and size:
            self.events.append((number, 0))


def _parts(tensor: Any) -> Iterator[Any]:
    """Yield the dense tensors of a sparse one; none for an opaque layout (MKL-DNN)."""
    for name in _PARTS.get(str(tensor.layout), ()):
        yield getattr(tensor, name)()


# The counters of torch's device.

# Called before a peak is reset, so that earlier measurements can record it first.
before_reset: Final[list[Callable[[], object]]] = []


def _simulated() -> Any:
    testing = sys.modules.get("oomguard.testing")
    if testing is None:
        return None
    return testing.active_device()


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda
    return None


def is_cached() -> bool:
    """Return whether tensors come from torch's caching allocator.

    A simulated device has one only if the test asks for it.
    """
    if (device := _simulated()) is not None:
        return bool(device.has_caching_allocator)
    return _cuda() is not None


def live_bytes(model: Any = None) -> int | None:
    """Return the bytes of live tensors.

    On a simulated device, the weights of ``model`` count from now on.
    """
    if (device := _simulated()) is not None:
        if hasattr(model, "parameters"):
            device.adopt([*model.parameters(), *model.buffers()])
        return int(device.live_bytes)
    cuda = _cuda()
    if cuda is None:
        return None
    return int(cuda.memory_allocated())


class MemoryPeak:
    """Measure the peak of live bytes in a ``with`` block; ``bytes`` is None without a device.

    A simulated device measures several peaks at once. CUDA has only one, so this resets it, also
    for a user who reads ``torch.cuda.max_memory_allocated``, and cannot restore it.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._device: Any = None
        self._meter: Any = None

    def __enter__(self) -> MemoryPeak:
        self._device = _simulated()
        if self._device is not None:
            self._meter = self._device.begin_meter()
        elif (cuda := _cuda()) is not None:
            for note in before_reset:
                note()
            cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_raised: object) -> None:
        if self._device is not None:
            self._device.end_meter(self._meter)
            self.bytes = int(self._meter.peak_bytes)
        elif _simulated() is None and (cuda := _cuda()) is not None:
            self.bytes = int(cuda.max_memory_allocated())


def free_bytes() -> int | None:
    """Return the bytes for new tensors: free on the device, or unused in the allocator."""
    if (device := _simulated()) is not None:
        return max(0, int(device.free_bytes + device.reserved_bytes - device.allocated_bytes))
    cuda = _cuda()
    if cuda is None:
        return None
    free, total = cuda.mem_get_info()
    room = int(free + cuda.memory_reserved() - cuda.memory_allocated())
    share = getattr(cuda, "get_per_process_memory_fraction", None)  # not in every version of torch
    if share is None:
        return room
    return min(room, max(0, int(share() * total) - int(cuda.memory_allocated())))


def counts(tensor: Any) -> bool:
    """Return whether a tensor uses device memory; a simulated device counts CPU tensors."""
    return _simulated() is not None or tensor.device.type != "cpu"


def on_host(*, really: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which CPU tensors are on the host, even for a simulated device."""
    if _simulated() is None or not really:
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()  # type: ignore[no-any-return]


def to_host(tensor: Any) -> Any:
    """Return a tensor's copy on the host, for ``from_host``."""
    if _simulated() is None:
        return tensor.to("cpu")
    with on_host():
        return tensor.clone()


def place(tensors: list[Any]) -> None:
    """Count tensors on the simulated device from now on; no effect without one.

    It raises the device's error if they do not fit.
    """
    if (device := _simulated()) is not None:
        device.place(tensors)


def is_simulated() -> bool:
    """Return whether the device in use is simulated, so that its tensors are the CPU's."""
    return _simulated() is not None


def from_host(tensor: Any, device: Any) -> Any:
    """Return a tensor of ``to_host`` on its device; this may run out of memory."""
    if _simulated() is None:
        return tensor.to(device)
    import torch

    back = torch.empty(tensor.shape, dtype=tensor.dtype)
    with on_host():
        return back.copy_(tensor)


def release(*, newest_only: bool = False) -> None:
    """Collect garbage and return cached blocks to the device.

    ``newest_only`` leaves out the oldest objects, which takes a hundredth of the time.
    """
    if newest_only:
        gc.collect(1)
    else:
        gc.collect()
    empty_cache()


def empty_cache() -> None:
    """Return cached blocks to the device."""
    if (device := _simulated()) is not None:
        device.empty_cache()
    elif (cuda := _cuda()) is not None:
        cuda.empty_cache()


# These peaks cover every device of torch, since several moments at once. CUDA's allocator has one
# peak, so each new measurement resets it after recording it for the earlier ones. That also resets
# the peak of a user who reads ``torch.cuda.max_memory_allocated``. The simulated device measures
# each peak separately.

_OF_SIMULATED: Final = Counter(SIMULATED, ALLOCATED)
_open: Final[list[Peaks]] = []
_lock = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a fork, because its owner may not exist there."""
    global _lock  # noqa: PLW0603 - of this process
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _torch_counters_cuda() -> Any:
    """Return torch's CUDA module; None before it is in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda
    return None


def _cuda_stats(cuda: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the statistics of each CUDA device from which this process has allocated."""
    for index in range(cuda.device_count()):
        stats = None
        with contextlib.suppress(RuntimeError):  # after an error of its own, CUDA reports nothing
            stats = cuda.memory_stats_as_nested_dict(index)
        if (
            stats and stats["reserved_bytes"]["all"]["allocated"]
        ):  # total over time, whatever was freed or reset
            yield index, stats


def now() -> dict[Counter, int]:
    """Return torch's allocated and reserved bytes; empty without a device."""
    if (device := _simulated()) is not None:
        return {_OF_SIMULATED: int(device.live_bytes)}
    cuda = _torch_counters_cuda()
    if cuda is None:
        return {}
    return {key: current for key, current, _ in _cuda_counters(cuda)}


def simulated_limits() -> dict[Counter, int]:
    """Return the capacity of the simulated device; empty without one."""
    device = _simulated()
    if device is None:
        return {}
    return {_OF_SIMULATED: int(device.capacity_bytes)}


def limits() -> dict[Counter, int]:
    """Return the bytes that each device has for torch."""
    if found := simulated_limits():
        return found
    cuda = _torch_counters_cuda()
    for index, _ in () if cuda is None else _cuda_stats(cuda):
        total = int(cuda.get_device_properties(index).total_memory)
        with contextlib.suppress(AttributeError):  # since torch 2.9
            total = min(total, int(total * cuda.get_per_process_memory_fraction(index)))
        found |= {Counter(f"cuda:{index}", what): total for what in (ALLOCATED, RESERVED)}
    return found


def _cuda_counters(cuda: Any) -> Iterator[tuple[Counter, int, int]]:
    """Yield each counter of CUDA with its current value and its peak."""
    for index, stats in _cuda_stats(cuda):
        for what in (ALLOCATED, RESERVED):
            counts = stats[f"{what}_bytes"]["all"]
            yield Counter(f"cuda:{index}", what), int(counts["current"]), int(counts["peak"])


class Peaks:
    """Measure the largest values from now until ``end``; ``bytes`` has them by counter."""

    def __init__(self) -> None:
        self.bytes: dict[Counter, int] = {}
        self._meters: list[tuple[Any, Any]] = []
        with _lock:
            if (cuda := _torch_counters_cuda()) is not None:
                _note()
                for index, _ in _cuda_stats(cuda):
                    cuda.reset_peak_memory_stats(index)
            _open.append(self)
        if (device := _simulated()) is not None:
            self._meters.append((device, device.begin_meter()))

    def take(self, values: Mapping[Counter, int]) -> None:
        """Add the counters of one moment, and ``follow``."""
        for key, value in values.items():
            self._rise_to(key, value)
        self.follow()

    def follow(self) -> None:
        """Also measure a simulated device that was entered later."""
        device = _simulated()
        if device is None:
            return
        for known, _ in self._meters:
            if known is device:
                return
        meter = device.begin_meter()
        # The device was entered after this measurement began, so all its counts belong to it.
        meter.peak_bytes = max(meter.peak_bytes, device.peak_bytes)
        self._meters.append((device, meter))

    def so_far(self) -> dict[Counter, int]:
        """Return the largest values so far."""
        _note()
        for _, meter in self._meters:
            self._rise_to(_OF_SIMULATED, int(meter.peak_bytes))
        return self.bytes

    def end(self) -> dict[Counter, int]:
        """Stop measuring; return the largest values."""
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
    """Record CUDA's peaks so far for all measurements."""
    with _lock:
        if _open:
            cuda = _torch_counters_cuda()
        else:
            cuda = None
        for key, _, peak in () if cuda is None else _cuda_counters(cuda):
            for measured in _open:
                measured._rise_to(key, peak)


before_reset.append(_note)
