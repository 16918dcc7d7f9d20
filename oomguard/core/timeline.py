"""Define the frozen records of a watch: counters, calls, samples and marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from oomguard.core.incident import Attempt
from oomguard.core.records import Record

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
