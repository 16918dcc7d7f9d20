"""Replay torch's caching allocator: the device bytes for a sequence of allocations and frees.

The rules are those of c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp (torch 2.13)
for one stream:

- The allocator rounds sizes up to 512 bytes.
- Blocks up to 1 MiB come from segments of 2 MiB, blocks up to 10 MiB from segments of 20 MiB.
  Larger blocks get their own segment in multiples of 2 MiB.
- It splits the best fitting free block. Among equals it takes the lowest address.
- It merges free neighbors. If the device is full, it returns free segments to the device.
- The driver assigns addresses from the top down, so a newer segment has a lower address.

The replay does not cover other streams, private pools, or memory that libraries allocate directly.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.core.facts import MIB

_ALIGNMENT_BYTES: Final = 512
_SMALL_BYTES: Final = MIB
_SMALL_SEGMENT_BYTES: Final = 2 * MIB
_LARGE_SEGMENT_BYTES: Final = 20 * MIB
_OWN_SEGMENT_BYTES: Final = 10 * MIB
_OWN_SEGMENT_STEP_BYTES: Final = 2 * MIB
_HIGHEST_ADDRESS: Final = 1 << 62


@dataclass(slots=True, eq=False)
class Block:
    """Describe a part of a segment; ``before`` and ``after`` are its neighbors.

    ``small`` blocks have at most 1 MiB.
    """

    size: int
    address: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


def _from(first: Block) -> Iterator[Block]:
    """Yield a block and its successors in the segment."""
    block: Block | None = first
    while block is not None:
        yield block
        block = block.after


@dataclass(frozen=True, slots=True, order=True)
class AllocatorSegment:
    """Describe one segment: (bytes, whether in use) of its blocks, in order.

    ``small`` segments serve blocks up to 1 MiB.
    """

    small: bool
    pieces: tuple[tuple[int, bool], ...]

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the blocks in use."""
        used = 0
        for size, in_use in self.pieces:
            if in_use:
                used += size
        return used


def segment_bytes(size: int) -> int:
    """Return the bytes that the allocator requests from the device for a block of ``size`` bytes.

    torch's message reports this size.
    """
    if size <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size // _OWN_SEGMENT_STEP_BYTES) * _OWN_SEGMENT_STEP_BYTES


class CachingAllocator:
    """Simulate an allocator on a device of ``capacity_bytes``; None means an endless device.

    ``reserved_bytes`` is the memory that the allocator has from the device.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._by_address: dict[int, Block] = {}
        self._lowest_address = _HIGHEST_ADDRESS

    @property
    def largest_free_bytes(self) -> int:
        """Return the size of the largest free block; a larger tensor needs more device memory."""
        largest = 0
        for free in self._free:
            if free:
                largest = max(largest, free[-1][0])
        return largest

    def allocate(self, size: int) -> Block | None:
        """Allocate a block; None if the device is full even without the free segments."""
        rounded = max(_ALIGNMENT_BYTES, -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        small = rounded <= _SMALL_BYTES
        block = self._cached(rounded, small=small) or self._segment(rounded)
        if block is None:
            return None
        left = block.size - rounded
        if left >= (_ALIGNMENT_BYTES if small else _SMALL_BYTES + 1):
            rest = self._block(left, block.address + rounded, small=block.small)
            rest.before = block
            rest.after = block.after
            if block.after is not None:
                block.after.before = rest
            block.size = rounded
            block.after = rest
            self._put(rest, small=small)
        return block

    def release(self, block: Block, size: int) -> None:
        """Free a block that was allocated with ``size`` bytes; the allocator caches it."""
        small = -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES <= _SMALL_BYTES
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour, small=small)
                block = self._joined(block, neighbour)
        self._put(block, small=small)

    def _block(self, size: int, address: int, *, small: bool) -> Block:
        block = self._by_address[address] = Block(size, address, small)
        return block

    def _new_address(self, size: int) -> int:
        self._lowest_address -= size
        return self._lowest_address

    def _cached(self, rounded: int, *, small: bool) -> Block | None:
        """Take the smallest free block that is large enough, or return None."""
        free = self._free[small]
        at = bisect_left(free, (rounded, 0))
        if at == len(free):
            return None
        block = self._by_address[free[at][1]]
        self._take(block, small=small)
        return block

    def _segment(self, rounded: int) -> Block | None:
        size = segment_bytes(rounded)
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            self.empty_cache()
            if self.reserved_bytes + size > self.capacity_bytes:
                return None
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return self._block(size, self._new_address(size), small=rounded <= _SMALL_BYTES)

    def segments(self) -> list[AllocatorSegment]:
        """Return the current segments, the oldest first."""
        found = []
        # A newer segment has a lower address.
        for address in sorted(self._by_address, reverse=True):
            first = self._by_address[address]
            if first.before is None:
                pieces = tuple((block.size, not block.free) for block in _from(first))
                found.append(AllocatorSegment(first.small, pieces))
        return found

    def take_over(self, pieces: Iterable[tuple[int, bool]], *, small: bool) -> list[Block]:
        """Add a segment from a snapshot and return its blocks in use.

        Args:
            pieces: (bytes, whether in use) of its blocks, in order.
            small: whether it serves allocations up to 1 MiB.
        """
        used = []
        before = None
        pieces = tuple(pieces)
        address = self._new_address(sum(size for size, _ in pieces))
        for size, in_use in pieces:
            block = self._block(size, address, small=small)
            address += size
            block.before = before
            if before is not None:
                before.after = block
            if in_use:
                used.append(block)
            else:
                self._put(block, small=small)
            self.reserved_bytes += size
            before = block
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return used

    def empty_cache(self) -> None:
        """Return every unused segment to the device, like ``torch.cuda.empty_cache``."""
        for small in (True, False):
            for size, address in list(self._free[small]):
                block = self._by_address[address]
                if block.before is None and block.after is None:
                    self._take(block, small=small)
                    del self._by_address[address]
                    self.reserved_bytes -= size

    def _joined(self, block: Block, neighbour: Block) -> Block:
        first, second = (neighbour, block) if block.before is neighbour else (block, neighbour)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._by_address[second.address]
        return first

    def _put(self, block: Block, *, small: bool) -> None:
        block.free = True
        insort(self._free[small], (block.size, block.address))

    def _take(self, block: Block, *, small: bool) -> None:
        free = self._free[small]
        del free[bisect_left(free, (block.size, block.address))]
        block.free = False


def replay(
    events: Iterable[tuple[int, int]],
    capacity_bytes: int | None = None,
    segments: Iterable[AllocatorSegment] = (),
) -> int | None:
    """Return the allocator's largest reservation over ``events``; None if the device is full.

    Args:
        events: (storage number, bytes, or 0 for its end), in order. The replay ignores the end of
            an unknown storage. Negative bytes mark a block that the operation can do without; an
            endless device does not count them.
        capacity_bytes: the device's size; None means an endless device.
        segments: the allocator's segments at the start.
    """
    allocator = CachingAllocator(capacity_bytes)
    for segment in segments:
        allocator.take_over(segment.pieces, small=segment.small)
    held: dict[int, tuple[Block, int]] = {}
    for number, size in events:
        if number in held:
            allocator.release(*held.pop(number))
        if size > 0 or (size < 0 and capacity_bytes is not None):
            block = allocator.allocate(abs(size))
            if block is not None:
                held[number] = (block, abs(size))
            elif size > 0:
                return None
    return allocator.peak_reserved_bytes


def least_capacity(events: Sequence[tuple[int, int]], allocated_bytes: int) -> int:
    """Return the smallest device, without the CUDA context, on which ``events`` succeed.

    The result is accurate to one part in a thousand, and at most what the allocator reserves
    without a limit. ``allocated_bytes`` is the largest number of bytes in use at once.
    """
    unlimited = replay(events)
    low = allocated_bytes
    high = max(allocated_bytes, unlimited or 0)
    while high - low > 1 + allocated_bytes // 1000:
        middle = (low + high) // 2
        low, high = (middle, high) if replay(events, middle) is None else (low, middle)
    return high
