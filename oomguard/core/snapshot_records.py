"""Define the records of an allocator snapshot: devices, segments, and live allocations."""

from __future__ import annotations

from dataclasses import dataclass, field

from oomguard.core.records import Record


@dataclass(frozen=True, slots=True, repr=False)
class Frame(Record):
    """Hold one line of a stack: the file, the line and the function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{'/'.join(self.file.rsplit('/', 2)[-2:])}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True, repr=False)
class LiveStack(Record):
    """Sum the live blocks that one stack allocated, innermost frame first.

    ``frames`` is empty if the snapshot recorded none.
    """

    bytes: int
    blocks: int
    largest_bytes: int
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class SegmentGroup(Record):
    """Sum the segments of one pool, stream and kind.

    An allocation of that pool, stream and kind can only use these segments.

    Attributes:
        pool: the id of a private pool (a CUDA graph's, a ``MemPool``'s); None for the shared pool.
        stream: the stream's handle; 0 is the default stream.
        is_large: whether it serves allocations above 1 MiB; None if the snapshot does not say.
        is_expandable: whether the segments can grow (``expandable_segments``).
        live_bytes: blocks in use, including blocks that wait for another stream.
        largest_free_bytes: the largest free block; 0 if none is free.
        waiting_bytes: freed blocks that wait for another stream.
    """

    pool: tuple[int, int] | None
    stream: int
    is_large: bool | None
    is_expandable: bool
    segments: int
    reserved_bytes: int
    live_bytes: int
    free_bytes: int
    largest_free_bytes: int
    waiting_bytes: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Refusal(Record):
    """Describe a failed allocation and the blocks that it could have used.

    The block figures are None if the snapshot does not show the blocks of that moment.

    Attributes:
        tried_bytes: the requested size, rounded up as the allocator does.
        device_free_bytes: memory that the driver had free; None if not recorded.
        free_blocks_bytes: free blocks in the segments of its stream and size, outside private
            pools.
        largest_free_bytes: the largest of these blocks.
        waiting_blocks_bytes: freed blocks in these segments that wait for another stream.
        frames: the stack of the request, innermost first, without torch's own lines.
        traceback: the same with torch's own Python lines.
    """

    tried_bytes: int
    device_free_bytes: int | None
    free_blocks_bytes: int | None = None
    largest_free_bytes: int | None = None
    waiting_blocks_bytes: int | None = None
    frames: tuple[Frame, ...] = ()
    traceback: tuple[Frame, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, repr=False)
class DeviceMemory(Record):
    """Describe one device in a snapshot.

    Attributes:
        reserved_bytes: all segments.
        allocated_bytes: blocks in use by tensors, rounded up as the allocator does;
            ``requested_bytes`` is the size before rounding.
        waiting_bytes: freed blocks that wait for another stream.
        split_bytes: free blocks in partly used segments, which cannot return to the driver.
        free_bytes: completely free segments.
        largest_free_bytes: the largest free block in any segment.
        private_pool_bytes: blocks in use in private pools.
        refusal: the last out-of-memory event; None if the recorded history contains none.
        refusals: the number of such events; ``events`` counts all events.
        earlier_refusals: the first 20 events before the last one.
        later_events: events after the last refusal that moved memory. oomguard undoes them, so that
            segments, blocks and stacks are those of the refusal.
        is_later: whether these events could not be undone, so that all figures are from the dump.
        groups: the segments by use, largest first; ``other_groups`` counts the rest.
        stacks: the allocators of live memory, largest first; ``other_stacks`` counts the rest.
    """

    index: int
    segments: int
    blocks: int
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    waiting_bytes: int
    split_bytes: int
    free_bytes: int
    largest_free_bytes: int
    private_pool_bytes: int
    refusal: Refusal | None = None
    refusals: int = 0
    events: int = 0
    earlier_refusals: tuple[Refusal, ...] = ()
    later_events: int = 0
    is_later: bool = False
    groups: tuple[SegmentGroup, ...] = ()
    other_groups: int = 0
    stacks: tuple[LiveStack, ...] = ()
    other_stacks: int = 0
    other_stacks_bytes: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Snapshot(Record):
    """Summarize an allocator snapshot.

    ``settings`` are the allocator's options as given; None if the snapshot does not contain them.
    """

    devices: tuple[DeviceMemory, ...] = ()
    settings: str | None = None
    notes: tuple[str, ...] = ()
