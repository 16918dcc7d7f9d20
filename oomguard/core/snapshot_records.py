"""What a snapshot says, as records: devices, the segments that torch holds of them, and who
allocated what is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oomguard.core.records import Record


@dataclass(frozen=True, slots=True, repr=False)
class Frame(Record):
    """One line of a stack: where in which file, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{'/'.join(self.file.rsplit('/', 2)[-2:])}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True, repr=False)
class LiveStack(Record):
    """The live blocks that one stack allocated, innermost frame first; no frames: none was
    recorded.
    """

    bytes: int
    blocks: int
    largest_bytes: int
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class SegmentGroup(Record):
    """The segments of one pool, stream and kind, which alone can serve an allocation of theirs.

    Attributes:
        pool: the id of a private pool (a CUDA graph's, a ``MemPool``'s); None for the pool of all
            others.
        stream: the stream's handle; 0 is the default stream.
        is_large: whether it serves allocations above 1 MiB; None where the snapshot does not say.
        is_expandable: whether the segments grow (``expandable_segments``).
        live_bytes: blocks in use, those that wait for another stream included.
        largest_free_bytes: the largest block that is free; 0: none is.
        waiting_bytes: blocks that are freed and wait for another stream.
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
    """An allocation that failed; of which blocks it could have used, None where the blocks of that
    moment are not known.

    Attributes:
        tried_bytes: what it asked for, rounded up as the allocator does.
        device_free_bytes: what the driver then had free; None where it is not told.
        free_blocks_bytes: the free blocks of the segments in which it could have been placed: its
            stream's, for its size, in no private pool.
        largest_free_bytes: the largest of these blocks.
        waiting_blocks_bytes: the blocks of these segments that are freed and wait for another
            stream.
        frames: where it was asked for, innermost first.
        traceback: the same with torch's own lines, as far as they are Python.
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
    """One device in a snapshot.

    Attributes:
        reserved_bytes: all segments.
        allocated_bytes: blocks in use by tensors, rounded up as the allocator does;
            ``requested_bytes`` before that.
        waiting_bytes: blocks that are freed and wait for another stream.
        split_bytes: free blocks in segments that are partly in use, which cannot go back to the
            driver.
        free_bytes: segments that are wholly free.
        largest_free_bytes: the largest free block, wherever it is.
        private_pool_bytes: blocks in use in private pools.
        refusal: the last out-of-memory event; None: there is none in the recorded history.
        refusals: how many such events there are; ``events`` counts all.
        earlier_refusals: those before the last, the first 20.
        later_events: events after the last refusal that moved memory. They are undone: segments,
            blocks and stacks are those of the refusal.
        is_later: whether they could not be undone, so that all of it is of the dump.
        groups: the segments by what they serve, the largest first; ``other_groups`` says how many
            more there are.
        stacks: who allocated what is alive, the largest first; ``other_stacks`` says how many more
            there are.
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
    """An allocation snapshot, summed up; ``settings`` are the allocator's options as they were
    given, None where it is not told.
    """

    devices: tuple[DeviceMemory, ...] = ()
    settings: str | None = None
    notes: tuple[str, ...] = ()
