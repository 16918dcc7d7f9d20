"""What a watch saw, as frozen records: counters before, at most and after, calls, samples and marks
in the order of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from oomguard.core.incident import Attempt
from oomguard.core.records import Record

HOST: Final = "host"
SIMULATED: Final = "simulated"
# What is counted: by torch's allocator, by NVML, by the kernel.
ALLOCATED: Final = "allocated"
RESERVED: Final = "reserved"
OWN: Final = "this process"
OTHERS: Final = "other processes"
IN_USE: Final = "in use"
RESIDENT: Final = "resident"


class Counter(NamedTuple):
    """One count of one device's bytes: ``("cuda:0", "allocated")``."""

    device: str
    what: str


@dataclass(frozen=True, slots=True, repr=False)
class MemoryUse(Record):
    """What one counter of one device showed before, at most during, and after; None: unknown.

    Attributes:
        device: ``cuda:0``, ``GPU 0`` by NVML's number where torch does not work on it,
            ``simulated``, or ``host``.
        what: ``allocated`` and ``reserved`` are torch's; ``this process``, ``other processes`` and
            ``in use`` (by all of them) are NVML's; ``resident`` is this process's memory on the
            host.
        limit_bytes: what the device has.
        sampled: whether the peak is the largest of samples; a shorter one between two of them is
            not in it.
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
    """An attempt of a guard inside a call, with when it began and ended in seconds since the watch
    began.
    """

    attempt: Attempt
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, repr=False)
class SeenCall(Record):
    """One call of an engine that a watch saw, or one span of the user's own.

    Attributes:
        what: the call (``generate``, ``forward``) or the span's label.
        kind: ``call``, ``span``, or ``function`` for a watched function.
        began_s: seconds since the watch began.
        model: the class that it is called on (``LlamaForCausalLM``); "" where there is none.
        rows: rows of the call; None where nothing tells. So are its tokens.
        uses: memory by counter; the peaks of calls that run at once in several threads hold one
            another's.
        attempts: those of a guard inside, where it ran the call in another way than it was made or
            measured it.
        error: the name of what it raised; "" where it did not.
        calls: how many calls this is: beyond a number of rows, calls of one name are added up.
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
        """The use to look at first: torch's allocated bytes of the device that rose most, else the
        first counter.
        """
        allocated = [use for use in self.uses if use.what == ALLOCATED]
        return max(
            allocated, key=lambda use: (use.peak_bytes or 0) - (use.before_bytes or 0), default=None
        ) or next(iter(self.uses), None)


@dataclass(frozen=True, slots=True, repr=False)
class Mark(Record):
    """A moment with a label of the user's."""

    seconds: float
    label: str


class Sample(NamedTuple):
    """What the counters showed at one moment, in seconds since the watch began."""

    seconds: float
    bytes: Mapping[Counter, int]


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Record):
    """All that a watch saw; ``error`` is the name of what ended its body, "" where nothing did."""

    seconds: float = 0.0
    uses: tuple[MemoryUse, ...] = ()
    rows: tuple[SeenCall, ...] = ()
    marks: tuple[Mark, ...] = ()
    samples: tuple[Sample, ...] = ()
    sample_every_s: float | None = None
    limits: Mapping[Counter, int] = field(default_factory=lambda: MappingProxyType({}))
    error: str = ""
    notes: tuple[str, ...] = ()
