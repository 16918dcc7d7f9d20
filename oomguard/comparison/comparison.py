"""The frozen records of a comparison: two starts, the rows that tell them apart, and what explains
those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oomguard.core.facts import FactValue
from oomguard.core.incident import EngineStart, Incident
from oomguard.core.records import Record
from oomguard.core.settings import Unit

Kind = Literal["version", "setting", "default", "budget", "capacity"]
# Where a value comes from. A setting "left alone" shows none; "not printed" is unknown.
Origin = Literal["set", "printed", "default", "solved", "left alone", "not printed"]


@dataclass(frozen=True, slots=True, repr=False)
class ComparedStart(Record):
    """One of the two starts compared; ``incident`` is its failure, ``starts`` how many starts its
    log holds.
    """

    source: str
    start: EngineStart
    incident: Incident | None = None
    starts: int = 1
    notes: tuple[str, ...] = ()

    def number(self, name: str) -> float | None:
        """Return the value of a numeric fact of the start, in the unit of its name; None if
        unknown.
        """
        fact = self.start.facts.get(name)
        if fact is None or isinstance(fact.value, (str, bool)):
            return None
        return fact.value

    def value(self, name: str) -> FactValue | None:
        """Return the value of any fact of the start, None if unknown."""
        fact = self.start.facts.get(name)
        if fact is None:
            return None
        return fact.value

    @property
    def version(self) -> str | None:
        """The version of the engine as the log prints it, None if it does not."""
        own = self.start.framework_version or self.value("framework_version")
        if own is None:
            return None
        return str(own)

    @property
    def outcome(self) -> str:
        """``worked``, or the kind of the failure."""
        if self.incident is None:
            return "worked"
        return self.incident.kind

    @property
    def utilization(self) -> float | None:
        """The share of the device that the engine may take, 0 to 1; None if unknown."""
        own = self.number("gpu_memory_utilization_ratio")
        if own is not None:
            return own
        return self.number("mem_fraction_static_ratio")

    @property
    def pool_is_given(self) -> bool:
        """Whether the user's byte count sets the size of the KV cache, and not the utilization."""
        return self.number("kv_cache_memory_bytes") is not None


@dataclass(frozen=True, slots=True, repr=False)
class ComparedValue(Record):
    """One side of a row.

    ``value`` is None if it is unknown or was left alone; ``slack`` is how far rounding may move it,
    in the row's unit.
    """

    value: FactValue | None
    origin: Origin = "printed"
    slack: float = 0.0

    @property
    def number(self) -> float | None:
        """The value if it is a number, else None."""
        if isinstance(self.value, (str, bool)):
            return None
        return self.value


@dataclass(frozen=True, slots=True, repr=False)
class Row(Record):
    """One thing compared; if only one log prints it, it tells no change."""

    name: str
    kind: Kind
    old: ComparedValue
    new: ComparedValue
    unit: Unit = ""

    @property
    def known(self) -> bool:
        """Whether both logs tell it."""
        return "not printed" not in {self.old.origin, self.new.origin}

    @property
    def changed(self) -> bool:
        """Whether both logs tell it and differ by more than the rounding of their figures."""
        if not self.known:
            return False
        if self.difference is not None:
            return abs(self.difference) > self.slack
        return self.old.value != self.new.value

    @property
    def difference(self) -> float | None:
        """New minus old, None unless both are numbers."""
        old = self.old.number
        new = self.new.number
        if old is None or new is None:
            return None
        return round(new - old, 9)

    @property
    def slack(self) -> float:
        """How much of the difference may be rounding."""
        return (self.old.slack + self.new.slack) * (1 + 1e-9) + (
            1e-9 if self.unit == "ratio" else 0
        )


RowsByName = Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One sentence; ``kv_cache_bytes`` is what its cause gives the KV cache (negative: takes from
    it), None if unknown.
    """

    text: str
    kv_cache_bytes: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Record):
    """Two starts and what changed between them; ``unknown`` lists what the logs leave open."""

    old: ComparedStart
    new: ComparedStart
    headline: str
    rows: tuple[Row, ...]
    explanations: tuple[Explanation, ...]
    unknown: tuple[str, ...]

    @property
    def changes(self) -> tuple[Row, ...]:
        """The rows that both logs tell, differently."""
        return tuple(row for row in self.rows if row.changed)

    @property
    def differs(self) -> bool:
        """Whether anything changed: a row, or whether and how the start failed."""
        return bool(self.changes) or self.old.outcome != self.new.outcome
