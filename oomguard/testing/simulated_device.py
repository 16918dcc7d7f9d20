"""A simulated device for tests: a real model on the CPU that runs out of a chosen number of bytes,
as CUDA would.

It counts the storages of every tensor that an operation makes or reads, and raises
``torch.OutOfMemoryError`` in CUDA's own wording when they pass the capacity. The bytes come from
running the model, never from a formula. It does not see the scratch memory inside kernels, and it
sees only the thread it was entered in.
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
from oomguard.probe.live_storages import LiveStorages, PeakMeter
from oomguard.testing.active_devices import entered
from oomguard.testing.sizes import read_size, written
from oomguard.testing.wordings import Figures, TorchMessage, find_wording

# The blocks in which torch's caching allocator would hold the tensors of a simulated device.


class CachedBlocks:
    """Follows the events of live storages (number, bytes; 0 for the end) with an allocator on a
    device of a size.

    ``allocated_bytes`` are the blocks of live storages, as ``torch.cuda.memory_allocated`` counts
    them.
    """

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.allocated_bytes = 0
        self._held: dict[int, tuple[Block, int]] = {}
        self._without_block: dict[int, int] = {}

    def follow(self, events: Iterable[tuple[int, int]], capacity_bytes: int) -> int | None:
        """Take the events in; return what the device was asked for where it has no room, None where
        all has a block.

        A storage without a block is tried again with the next events, as long as it lives: weights
        that did not fit.
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
    """A device of ``capacity_bytes``; ``live_bytes`` and ``peak_bytes`` are exact for the tensors
    it has seen.

    Tensors that existed before count from the moment an operation first reads them, as weights do
    that are moved to a device. Raises torch.OutOfMemoryError from the operation whose result does
    not fit. ``allocations`` counts the tensors that operations made.
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
        self._thread: int | None = None

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

    @property
    def has_caching_allocator(self) -> bool:
        """Whether the device counts what torch's caching allocator holds for the tensors."""
        return self._blocks is not None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the allocator's blocks in which live tensors are; ``live_bytes`` without a
        caching allocator.
        """
        blocks = self._blocks_now()
        if blocks is None:
            return self.live_bytes
        return blocks.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch holds of the device; ``live_bytes`` without a caching allocator."""
        blocks = self._blocks_now()
        if blocks is None:
            return self.live_bytes
        return blocks.allocator.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that torch held since ``reset_peak``; ``peak_bytes`` without a caching
        allocator.
        """
        if self._blocks is None:
            return self.peak_bytes
        return self._blocks.allocator.peak_reserved_bytes

    @property
    def largest_free_block_bytes(self) -> int:
        """The largest block that torch holds and no tensor uses; 0 without a caching allocator,
        which keeps none.
        """
        blocks = self._blocks_now()
        if blocks is None:
            return 0
        return blocks.allocator.largest_free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that neither torch nor another process holds."""
        return max(0, self.capacity_bytes - self._others_bytes - self.reserved_bytes)

    @property
    def other_processes_bytes(self) -> int:
        """Bytes of the device that other processes hold; may be set (``"1 GiB"``, bytes) while a
        test runs, up to what is free.
        """
        return self._others_bytes

    @other_processes_bytes.setter
    def other_processes_bytes(self, size: str | int) -> None:
        size_bytes = read_size(size, "size of other processes")
        room = self.free_bytes + self._others_bytes
        if size_bytes > room:
            raise SettingError(
                f"other processes cannot hold {written(size_bytes)}: a device of "
                f"{written(self.capacity_bytes)}, "
                f"of which torch holds {written(self.reserved_bytes)}, leaves {written(room)} to "
                "them",
                hint=(
                    f"at most device.other_processes_bytes = {room}; free tensors, or call "
                    "device.empty_cache(), before"
                ),
            )
        self._others_bytes = size_bytes

    def __enter__(self) -> SimulatedDevice:
        self._thread = threading.get_ident()
        entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        entered.remove(self)
        super().__exit__(*exc_info)

    def __call__(self, function: F) -> F:
        """Run every call of a plain function on this device, as ``@limit_memory("8 GiB")`` does.

        Raises UsageError for a class, a coroutine and a generator: their code does not run in the
        call.
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
                hint=(
                    'write with limit_memory("8 GiB") as device: around the code that is to run on '
                    "the device"
                ),
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", call)

    def reset_peak(self) -> None:
        """Forget the peaks so far."""
        self._storages.reset_peak()
        if self._blocks is not None:
            self._blocks.allocator.peak_reserved_bytes = self.reserved_bytes

    def begin_meter(self) -> PeakMeter:
        """Measure one more peak from now, which ``reset_peak`` does not touch, until
        ``end_meter``.
        """
        return self._storages.begin_meter()

    def end_meter(self, meter: PeakMeter) -> None:
        """Measure this peak no longer."""
        self._storages.end_meter(meter)

    def empty_cache(self) -> None:
        """Give the blocks that torch keeps unused back to the device, as ``torch.cuda.empty_cache``
        does.
        """
        blocks = self._blocks_now()
        if blocks is not None:
            blocks.allocator.empty_cache()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors from now, as if an operation had read them: a model's weights before
        its first call.
        """
        for tensor in tensors:
            with (
                torch._C._DisableTorchDispatch()
            ):  # the parts of a sparse tensor are asked for by operations
                self._storages.adopt(tensor)

    def place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors from now, as weights that are loaded on the device; where one does
        not fit raise, and count none.
        """
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
        __tracebackhide__ = True  # pytest then shows the line of the test
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            # a tensor that runs its operations itself: those that it makes come here one by one
            return NotImplemented
        made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key
        if torch.is_inference_mode_enabled() and made_of_others(func.name(), _MADE_OF_OTHERS):
            # There an operation that is made of others arrives whole: what it holds meanwhile would
            # not be counted. Its own kernel is asked, not a decomposition in Python beside it,
            # which may copy what the kernel hands through (dropout).
            with self:
                return func._op_dk(_MADE_OF_OTHERS, *args, **(kwargs or {}))
        before = self.live_bytes
        for leaf in tree_leaves((args, kwargs or {})):
            self._storages.adopt(leaf)
        tried = self._settle(before)
        if (
            tried is not None
        ):  # weights that are first read here, or a storage that grew, may already be too much
            self._fail(self.live_bytes - tried, tried)
        before = self.live_bytes
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._storages.adopt(leaf)
        tried = self._settle(before, made=True)
        if tried is not None:
            # The result goes with this frame: what the exception's traceback keeps is no part of
            # the device's load.
            out = leaf = args = kwargs = None
            self._fail(before, tried)
        self._storages.note_peak()
        return out

    def _blocks_now(self) -> CachedBlocks | None:
        """Return the blocks as of now; a thread that only looks on gets them as of the last
        operation.
        """
        if self._blocks is not None and self._thread in (None, threading.get_ident()):
            self._settle()
        return self._blocks

    def _settle(self, before: int = 0, *, made: bool = False) -> int | None:
        """Take in what became of storages since the last call; return the bytes that were refused,
        None where all fit.

        Args:
            before: the live bytes before what is newest was counted.
            made: whether an operation made what is newest; else it was there before, and is first
                read.
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
        # Where nothing grew, something of before does not fit as it is: what is past the device.
        return max(self.live_bytes - before, 0) or self.live_bytes - room

    def _fail(self, live: int, tried: int) -> None:
        """Raise in the words of torch: the figures are those before the operation that failed."""
        __tracebackhide__ = True
        allocated, reserved = (
            (live, live) if self._blocks is None else (self.allocated_bytes, self.reserved_bytes)
        )
        free = max(0, self.capacity_bytes - self._others_bytes - reserved)
        figures = Figures(tried, self._total_bytes, free, allocated, reserved, self._others_bytes)
        raise self._wording.error(figures)
