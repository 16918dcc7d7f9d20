"""Define the frozen records of measured memory: allocator snapshots, and what a watch saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from oomguard.core.incident import Attempt
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


HOST: Final = "host"
SIMULATED: Final = "simulated"
# Counted by torch's allocator, NVML or the kernel.
ALLOCATED: Final = "allocated"
RESERVED: Final = "reserved"
OWN: Final = "this process"
OTHERS: Final = "other processes"
IN_USE: Final = "in use"
RESIDENT: Final = "resident"


class Counter(NamedTuple):
    """Name one counter of one device, such as ``("cuda:0", "allocated")``."""

    device: str
    what: str


@dataclass(frozen=True, slots=True, repr=False)
class MemoryUse(Record):
    """Hold one counter's value before, at its peak, and after; None if unknown.

    Attributes:
        device: ``cuda:0``, ``GPU 0`` (NVML's number, if torch does not use it), ``simulated`` or
            ``host``.
        what: ``allocated`` and ``reserved`` come from torch; ``this process``, ``other processes``
            and ``in use`` come from NVML; ``resident`` is this process's host memory.
        limit_bytes: the device's memory; None if unknown.
        sampled: whether the peak is the largest sample, so that it may miss a shorter peak.
    """

    device: str
    what: str
    before_bytes: int | None
    peak_bytes: int | None
    after_bytes: int | None
    limit_bytes: int | None = None
    sampled: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class TimedAttempt(Record):
    """Hold a guard's attempt inside a call; times are seconds since the watch began."""

    attempt: Attempt
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, repr=False)
class SeenCall(Record):
    """Describe one engine call, or one span of the user's code, that a watch recorded.

    Attributes:
        what: the call (``generate``, ``forward``) or the span's label.
        kind: ``call``, ``span``, or ``function`` for a watched function.
        began_s: seconds since the watch began.
        model: the class of the called model (``LlamaForCausalLM``); "" if there is none.
        rows: the number of rows; None if unknown. The same holds for its tokens.
        uses: memory by counter. Peaks of concurrent calls in several threads include each other.
        attempts: a guard's attempts, if it changed how the call ran or measured it.
        error: the name of the raised exception; "" if there was none.
        calls: the number of calls; above a limit, calls with the same name are summed.
    """

    what: str
    kind: str
    began_s: float
    seconds: float
    model: str = ""
    rows: int | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    uses: tuple[MemoryUse, ...] = ()
    attempts: tuple[TimedAttempt, ...] = ()
    error: str = ""
    calls: int = 1

    @property
    def use(self) -> MemoryUse | None:
        """The use to look at first: the device whose allocated bytes rose most.

        Without a torch counter it is the first counter; None without any counter.
        """
        allocated = [use for use in self.uses if use.what == ALLOCATED]
        return max(
            allocated, key=lambda use: (use.peak_bytes or 0) - (use.before_bytes or 0), default=None
        ) or next(iter(self.uses), None)


@dataclass(frozen=True, slots=True, repr=False)
class Mark(Record):
    """Mark a moment with the user's label."""

    seconds: float
    label: str


class Sample(NamedTuple):
    """Hold the counters of one moment, in seconds since the watch began."""

    seconds: float
    bytes: Mapping[Counter, int]


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Record):
    """Hold everything that a watch recorded.

    ``error`` is the name of the exception that ended its body; "" if there was none.
    """

    seconds: float = 0.0
    uses: tuple[MemoryUse, ...] = ()
    rows: tuple[SeenCall, ...] = ()
    marks: tuple[Mark, ...] = ()
    samples: tuple[Sample, ...] = ()
    sample_every_s: float | None = None
    limits: Mapping[Counter, int] = field(default_factory=lambda: MappingProxyType({}))
    error: str = ""
    notes: tuple[str, ...] = ()
