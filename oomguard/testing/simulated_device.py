"""Simulate a GPU on the CPU: a real model runs out of a chosen number of bytes, as under CUDA.

The device counts the storages of all tensors that operations make or read. If they exceed the
capacity, it raises ``torch.OutOfMemoryError`` with CUDA's wording. The bytes come from running the
model, not from a formula. The device does not see scratch memory inside kernels, and it sees only
the thread that entered it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomguard.core.errors import SettingError, UsageError
from oomguard.estimate.call.allocator import Block, CachingAllocator, segment_bytes
from oomguard.probe.torch_memory import LiveStorages, PeakMeter
from oomguard.testing.limit import active_devices
from oomguard.testing.wordings import Figures, TorchMessage, find_wording, format_size, read_size

# Blocks in which torch's caching allocator would store the tensors of a simulated device.


class CachedBlocks:
    """Replay the storages of tensors (number, bytes; 0 at the end) in a caching allocator.

    ``allocated_bytes`` counts the blocks of live storages, like ``torch.cuda.memory_allocated``.
    """

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.allocated_bytes = 0
        self._held: dict[int, tuple[Block, int]] = {}
        self._without_block: dict[int, int] = {}

    def follow(self, events: Iterable[tuple[int, int]], capacity_bytes: int) -> int | None:
        """Replay events; return the requested bytes if the device is full, otherwise None.

        A storage without a block, such as weights that did not fit, is tried again with the next
        events.
        """
        self.allocator.capacity_bytes = capacity_bytes
        refused = None
        for number, size in events:
            self._without_block.pop(number, None)
            if number in self._held:
                block, asked = self._held.pop(number)
                self.allocated_bytes -= block.size
                self.allocator.release(block, asked)
            if size:
                self._without_block[number] = size
                if refused is None and not self._place(number):
                    refused = segment_bytes(size)
        for number, size in [*self._without_block.items()] if refused is None else ():
            if not self._place(number):
                return segment_bytes(size)
        return refused

    def _place(self, number: int) -> bool:
        size = self._without_block[number]
        block = self.allocator.allocate(size)
        if block is None:
            return False
        del self._without_block[number]
        self._held[number] = (block, size)
        self.allocated_bytes += block.size
        return True


F = TypeVar("F", bound=Callable[..., Any])
_MADE_OF_OTHERS: Final = torch._C.DispatchKey.CompositeImplicitAutograd


class SimulatedDevice(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Simulate a device of ``capacity_bytes`` for the tensors that it sees.

    An older tensor counts after an operation first reads it, like weights that are moved to a
    device. If the result of an operation does not fit, the operation raises torch.OutOfMemoryError.
    ``allocations`` counts the tensors that operations made. ``live_bytes`` and ``peak_bytes`` are
    exact. ``thread`` is the identifier of the thread that entered the device last.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        caching_allocator: bool = False,
        other_processes_bytes: int = 0,
        fail_at: Collection[int] = (),
        wording: TorchMessage | None = None,
    ) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.allocations = 0
        self._others_bytes = other_processes_bytes
        self._fail_at = fail_at
        self._wording = wording or find_wording()
        self._blocks = CachedBlocks() if caching_allocator else None
        self._storages = LiveStorages(keep_events=True)
        self._newest = 0
        self.thread: int | None = None

    @property
    def _total_bytes(self) -> int:
        """The size of the device in torch's message."""
        return self.capacity_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the live tensors."""
        return self._storages.bytes

    @property
    def peak_bytes(self) -> int:
        """Largest number of live bytes after an operation since ``reset_peak``."""
        return self._storages.peak_bytes

    @property
    def has_caching_allocator(self) -> bool:
        """Whether the device simulates torch's caching allocator."""
        return self._blocks is not None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks with live tensors; ``live_bytes`` without a caching allocator."""
        blocks = self._blocks_now()
        if blocks is None:
            return self.live_bytes
        return blocks.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch has reserved; ``live_bytes`` without a caching allocator."""
        blocks = self._blocks_now()
        if blocks is None:
            return self.live_bytes
        return blocks.allocator.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Peak of ``reserved_bytes`` since ``reset_peak``."""
        if self._blocks is None:
            return self.peak_bytes
        return self._blocks.allocator.peak_reserved_bytes

    @property
    def largest_free_block_bytes(self) -> int:
        """Bytes of torch's largest unused block; 0 without a caching allocator."""
        blocks = self._blocks_now()
        if blocks is None:
            return 0
        return blocks.allocator.largest_free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that neither torch nor another process uses."""
        return max(0, self.capacity_bytes - self._others_bytes - self.reserved_bytes)

    @property
    def other_processes_bytes(self) -> int:
        """Bytes of the device that other processes use.

        A test may set it (``"1 GiB"``, bytes), up to the free memory.
        """
        return self._others_bytes

    @other_processes_bytes.setter
    def other_processes_bytes(self, size: str | int) -> None:
        size_bytes = read_size(size, "size of other processes")
        # The present share is replaced, so it counts as free here.
        room = self.free_bytes + self._others_bytes
        if size_bytes > room:
            raise SettingError(
                f"other processes cannot use {format_size(size_bytes)}: torch holds "
                f"{format_size(self.reserved_bytes)} of the device's "
                f"{format_size(self.capacity_bytes)}, so {format_size(room)} are left",
                hint=(
                    f"set device.other_processes_bytes to at most {room}, or first free tensors or "
                    "call device.empty_cache()"
                ),
            )
        self._others_bytes = size_bytes

    def __enter__(self) -> SimulatedDevice:
        # A dispatch mode sees only its own thread, so other threads ask for the device by this.
        self.thread = threading.get_ident()
        active_devices.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        active_devices.remove(self)
        super().__exit__(*exc_info)

    def __call__(self, function: F) -> F:
        """Run every call of a plain function on this device, as in ``@limit_memory("8 GiB")``.

        Raises:
            UsageError: it is a class, a coroutine or a generator, whose code does not run during
                the call.
        """
        tests = (
            inspect.isclass,
            inspect.iscoroutinefunction,
            inspect.isgeneratorfunction,
            inspect.isasyncgenfunction,
        )
        if not callable(function) or any(test(function) for test in tests):
            raise UsageError(
                f"limit_memory decorates a plain function, not {function!r}",
                hint=('use a block: with limit_memory("8 GiB") as device:'),
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", call)

    def reset_peak(self) -> None:
        """Reset all peaks."""
        self._storages.reset_peak()
        if self._blocks is not None:
            self._blocks.allocator.peak_reserved_bytes = self.reserved_bytes

    def begin_meter(self) -> PeakMeter:
        """Begin another peak measurement, which ``reset_peak`` does not affect."""
        return self._storages.begin_meter()

    def end_meter(self, meter: PeakMeter) -> None:
        """End a peak measurement."""
        self._storages.end_meter(meter)

    def empty_cache(self) -> None:
        """Release unused blocks to the device, as ``torch.cuda.empty_cache`` does."""
        blocks = self._blocks_now()
        if blocks is not None:
            blocks.allocator.empty_cache()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors now, such as a model's weights before its first call."""
        for tensor in tensors:
            with torch._C._DisableTorchDispatch():
                # Sparse tensors report their parts only through operations.
                self._storages.adopt(tensor)

    def place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors as loaded weights; if one does not fit, raise and count none."""
        counted: list[torch.Tensor] = []
        with torch._C._DisableTorchDispatch():
            for tensor in tensors:
                before = self.live_bytes
                self._storages.adopt(tensor)
                if self.live_bytes > before:
                    counted.append(tensor)
                tried = self._settle(before)
                if tried is not None:
                    live = self.live_bytes - tried
                    for one in counted:
                        self._storages.drop(one)
                    self._settle()
                    self._fail(live, tried)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # pytest then shows the line of the test.
        __tracebackhide__ = True
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            # This tensor subclass runs its own operations, which arrive here one by one.
            return NotImplemented
        made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key
        if torch.is_inference_mode_enabled() and made_of_others(func.name(), _MADE_OF_OTHERS):
            # A composite operation arrives here as a whole, so its intermediate tensors would not
            # count. Use its native kernel. A Python decomposition may copy what the kernel passes
            # through, as in dropout.
            with self:
                return func._op_dk(_MADE_OF_OTHERS, *args, **(kwargs or {}))
        before = self.live_bytes
        for leaf in tree_leaves((args, kwargs or {})):
            self._storages.adopt(leaf)
        tried = self._settle(before)
        if tried is not None:
            # Weights on first use or a storage that grew may already exceed the device.
            self._fail(self.live_bytes - tried, tried)
        before = self.live_bytes
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._storages.adopt(leaf)
        tried = self._settle(before, made=True)
        if tried is not None:
            # Delete the result with this frame: tensors in the traceback are not a load of the
            # device.
            out = leaf = args = kwargs = None
            self._fail(before, tried)
        self._storages.note_peak()
        return out

    def _blocks_now(self) -> CachedBlocks | None:
        """Return the current blocks; another thread gets those of the last operation."""
        if self._blocks is not None and self.thread in (None, threading.get_ident()):
            self._settle()
        return self._blocks

    def _settle(self, before: int = 0, *, made: bool = False) -> int | None:
        """Process storages that appeared or ended; return the refused bytes, or None if all fit.

        Args:
            before: the live bytes before the newest storage was counted.
            made: whether an operation made the newest storage. If not, it is an older one on first
                use.
        """
        events = self._storages.take_events()
        room = self.capacity_bytes - self._others_bytes
        for at, (number, size) in enumerate(events):
            if number <= self._newest or not size:
                continue
            self._newest = number
            if not made:
                continue
            self.allocations += 1
            if self.allocations in self._fail_at:
                if self._blocks is not None:
                    self._blocks.follow(events[:at], room)
                return size
        if self._blocks is not None:
            return self._blocks.follow(events, room)
        if self.live_bytes <= room:
            return None
        # If nothing grew, an older storage does not fit; report the excess over the device.
        return max(self.live_bytes - before, 0) or self.live_bytes - room

    def _fail(self, live: int, tried: int) -> None:
        """Raise torch's error with the numbers from before the failed operation."""
        __tracebackhide__ = True
        allocated, reserved = (
            (live, live) if self._blocks is None else (self.allocated_bytes, self.reserved_bytes)
        )
        free = max(0, self.capacity_bytes - self._others_bytes - reserved)
        figures = Figures(tried, self._total_bytes, free, allocated, reserved, self._others_bytes)
        raise self._wording.error(figures)
