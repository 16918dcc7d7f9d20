"""A simulated device for tests: a real model on the CPU that runs out of a chosen number of bytes, as CUDA would.

It counts the storages of every tensor that an operation makes or reads, and raises ``torch.OutOfMemoryError`` in
CUDA's own wording when they pass the capacity. The bytes come from running the model, never from a formula.
It does not see the scratch memory inside kernels, and it sees only the thread it was entered in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomguard.errors import SettingError
from oomguard.live_storages import LiveStorages, PeakMeter

_UNITS: Final = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MADE_OF_OTHERS: Final = torch._C.DispatchKey.CompositeImplicitAutograd
_active: list[SimulatedDevice] = []


class SimulatedDevice(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """A device of ``capacity_bytes``; ``live_bytes`` and ``peak_bytes`` are exact for the tensors it has seen.

    Tensors that existed before count from the moment an operation first reads them, as weights do that are moved
    to a device. Raises torch.OutOfMemoryError from the operation whose result does not fit.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self._storages = LiveStorages()

    @property
    def _total_bytes(self) -> int:
        """What torch's message tells as the device's size."""
        return self.capacity_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that are alive now."""
        return self._storages.bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was alive after an operation since ``reset_peak``."""
        return self._storages.peak_bytes

    def __enter__(self) -> SimulatedDevice:
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _active.remove(self)
        super().__exit__(*exc_info)

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._storages.reset_peak()

    def begin_meter(self) -> PeakMeter:
        """Measure one more peak from now, which ``reset_peak`` does not touch, until ``end_meter``."""
        return self._storages.begin_meter()

    def end_meter(self, meter: PeakMeter) -> None:
        """Measure this peak no longer."""
        self._storages.end_meter(meter)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors from now, as if an operation had read them: a model's weights before its first call."""
        for tensor in tensors:
            self._storages.adopt(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a tensor that runs its operations itself: those that it makes come here one by one
        made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key
        if torch.is_inference_mode_enabled() and made_of_others(func.name(), _MADE_OF_OTHERS):
            # There an operation that is made of others arrives whole: what it holds meanwhile would not be counted. Its own
            # kernel is asked, not a decomposition in Python beside it, which may copy what the kernel hands through (dropout).
            with self:
                return func._op_dk(_MADE_OF_OTHERS, *args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs or {})):
            self._storages.adopt(leaf)
        before = self.live_bytes
        self._check(before, 0)  # weights that are first read here may already be too much
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._storages.adopt(leaf)
        if self.live_bytes > self.capacity_bytes:
            tried = self.live_bytes - before
            # The result goes with this frame: what the exception's traceback keeps is no part of the device's load.
            out = leaf = args = kwargs = None
            self._fail(before, tried)
        self._storages.note_peak()
        return out

    def _check(self, live: int, tried: int) -> None:
        if live + tried > self.capacity_bytes:
            self._fail(live, tried)

    def _fail(self, live: int, tried: int) -> None:
        """Raise in the words of c10/cuda/CUDACachingAllocator.cpp (torch 2.13)."""
        free = max(0, self.capacity_bytes - live)
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {_size(tried)}. GPU 0 has a total capacity of {_size(self._total_bytes)} "
            f"of which {_size(free)} is free. Including non-PyTorch memory, this process has {_size(live)} memory in use. "
            f"Of the allocated memory {_size(live)} is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        )


def limit_memory(size: str | int) -> SimulatedDevice:
    """A context manager that simulates a device of this size, ``"256 MiB"`` or a number of bytes.

    Raises SettingError where the size is not one, or is not positive.
    """
    if isinstance(size, str):
        number, unit = size.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"), ""
        unit = size.strip()[len(number) :].lower() or "b"
        try:
            capacity = round(float(number) * _UNITS[unit])
        except (ValueError, KeyError):
            raise SettingError(f"not a size: {size!r}", hint='write it as "256 MiB" or "2 GiB"') from None
    else:
        capacity = size
    if capacity <= 0:
        raise SettingError(f"a device of {size} cannot hold anything")
    return SimulatedDevice(capacity)


def active_device() -> SimulatedDevice | None:
    """The innermost simulated device that is in force, None outside."""
    return _active[-1] if _active else None


def _size(size_bytes: int) -> str:
    """As torch writes sizes (c10/util/Exception format_size): two decimals, bytes below one KiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} bytes"
