"""The blocks in which torch's caching allocator would hold the tensors of a simulated device."""

from __future__ import annotations

from collections.abc import Iterable

from oomguard.memory.generate.caching_allocator import Block, CachingAllocator, segment_bytes


class CachedBlocks:
    """Follows the events of live storages (number, bytes; 0 for the end) with an allocator on a device of a size.

    ``allocated_bytes`` are the blocks of live storages, as ``torch.cuda.memory_allocated`` counts them.
    """

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.allocated_bytes = 0
        self._held: dict[int, tuple[Block, int]] = {}
        self._without_block: dict[int, int] = {}

    def follow(self, events: Iterable[tuple[int, int]], capacity_bytes: int) -> int | None:
        """Take the events in; return what the device was asked for where it has no room, None where all has a block.

        A storage without a block is tried again with the next events, as long as it lives: weights that did not fit.
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
