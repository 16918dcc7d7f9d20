"""Live and peak bytes of the device that torch works on: the simulated one, else CUDA; None if neither is in use."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

# Called before a peak is measured anew: who measures it since earlier notes it first.
before_reset: Final[list[Callable[[], object]]] = []


def _simulated() -> Any:
    testing = sys.modules.get("oomguard.testing")
    return None if testing is None else testing.active_device()


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def is_cached() -> bool:
    """Return whether tensors come from torch's caching allocator; a simulated device counts them as they are unless asked."""
    if (device := _simulated()) is not None:
        return bool(device.has_caching_allocator)
    return _cuda() is not None


def live_bytes(model: Any = None) -> int | None:
    """Return the bytes in live tensors now; on a simulated device the weights of ``model`` count from here on."""
    if (device := _simulated()) is not None:
        if hasattr(model, "parameters"):
            device.adopt([*model.parameters(), *model.buffers()])
        return int(device.live_bytes)
    cuda = _cuda()
    return None if cuda is None else int(cuda.memory_allocated())


class Peak:
    """The largest number of live bytes while its ``with`` block runs, as ``bytes`` after it; None where no device is in use.

    A simulated device counts it by itself and keeps the peak that its user reads. CUDA knows one peak: it is measured anew, also for
    a user who reads ``torch.cuda.max_memory_allocated``, and there is no way to put the old one back.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._device: Any = None
        self._meter: Any = None

    def __enter__(self) -> Peak:
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
    """Return the bytes that new tensors may take: what the device has free and what torch's allocator keeps unused."""
    if (device := _simulated()) is not None:
        return max(0, int(device.free_bytes + device.reserved_bytes - device.allocated_bytes))
    cuda = _cuda()
    if cuda is None:
        return None
    free, total = cuda.mem_get_info()
    room = int(free + cuda.memory_reserved() - cuda.memory_allocated())
    share = getattr(cuda, "get_per_process_memory_fraction", None)  # not in every version of torch
    return room if share is None else min(room, max(0, int(share() * total) - int(cuda.memory_allocated())))


def counts(tensor: Any) -> bool:
    """Return whether a tensor takes the device's memory; a simulated device counts those of the CPU."""
    return _simulated() is not None or tensor.device.type != "cpu"


def on_host(*, really: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which tensors on the CPU are the host's, also while a simulated device counts them."""
    if _simulated() is None or not really:
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()  # type: ignore[no-any-return]


def to_host(tensor: Any) -> Any:
    """Return a tensor's copy on the host, which ``from_host`` takes back."""
    if _simulated() is None:
        return tensor.to("cpu")
    with on_host():
        return tensor.clone()


def place(tensors: list[Any]) -> None:
    """Count tensors on the simulated device from here on; raises its error where they do not fit, and does nothing without one."""
    if (device := _simulated()) is not None:
        device.place(tensors)


def is_simulated() -> bool:
    """Return whether the device in use is a simulated one, whose tensors are the CPU's."""
    return _simulated() is not None


def from_host(tensor: Any, device: Any) -> Any:
    """Return a tensor of ``on_host`` on its device; it may run out of memory there."""
    if _simulated() is None:
        return tensor.to(device)
    import torch

    back = torch.empty(tensor.shape, dtype=tensor.dtype)
    with on_host():
        return back.copy_(tensor)


def release() -> None:
    """Collect garbage and give cached blocks back to the device."""
    gc.collect()
    empty_cache()


def empty_cache() -> None:
    """Give cached blocks back to the device."""
    if (device := _simulated()) is not None:
        device.empty_cache()
    elif (cuda := _cuda()) is not None:
        cuda.empty_cache()
