"""Define the records of a comparison: two starts, their rows, and explanations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oomguard.core.facts import FactValue
from oomguard.core.incident import EngineStart, Incident
from oomguard.core.records import Record
from oomguard.core.settings import Unit

Kind = Literal["version", "setting", "default", "budget", "capacity"]
# The source of a value. A setting "left alone" has no value; "not printed" is unknown.
Origin = Literal["set", "printed", "default", "solved", "left alone", "not printed"]


@dataclass(frozen=True, slots=True, repr=False)
class ComparedStart(Record):
    """Hold one of two compared starts.

    ``incident`` is its failure, None if it worked. ``starts`` is the number of starts in its log.
    """

    source: str
    start: EngineStart
    incident: Incident | None = None
    starts: int = 1
    notes: tuple[str, ...] = ()

    def number(self, name: str) -> float | None:
        """Return a numeric fact of the start in the unit of its name, or None if unknown."""
        fact = self.start.facts.get(name)
        if fact is None or isinstance(fact.value, (str, bool)):
            return None
        return fact.value

    def value(self, name: str) -> FactValue | None:
        """Return any fact of the start, or None if unknown."""
        fact = self.start.facts.get(name)
        if fact is None:
            return None
        return fact.value

    @property
    def version(self) -> str | None:
        """Return the engine's version in the log, or None."""
        own = self.start.framework_version or self.value("framework_version")
        if own is None:
            return None
        return str(own)

    @property
    def outcome(self) -> str:
        """Return ``worked``, or the kind of the failure."""
        if self.incident is None:
            return "worked"
        return self.incident.kind

    @property
    def utilization(self) -> float | None:
        """Return the share of the device for the engine, 0 to 1; None if unknown."""
        own = self.number("gpu_memory_utilization_ratio")
        if own is not None:
            return own
        return self.number("mem_fraction_static_ratio")

    @property
    def pool_is_given(self) -> bool:
        """Return whether the user set the size of the KV cache in bytes."""
        return self.number("kv_cache_memory_bytes") is not None


@dataclass(frozen=True, slots=True, repr=False)
class ComparedValue(Record):
    """Hold one side of a row.

    ``value`` is None if it is unknown or was left alone. ``slack`` is its rounding in the row's
    unit.
    """

    value: FactValue | None
    origin: Origin = "printed"
    slack: float = 0.0

    @property
    def number(self) -> float | None:
        """Return the value if it is a number, else None."""
        if isinstance(self.value, (str, bool)):
            return None
        return self.value


@dataclass(frozen=True, slots=True, repr=False)
class Row(Record):
    """Compare one thing; if only one log prints it, it is not a change."""

    name: str
    kind: Kind
    old: ComparedValue
    new: ComparedValue
    unit: Unit = ""

    @property
    def known(self) -> bool:
        """Return whether both logs have a value."""
        return "not printed" not in {self.old.origin, self.new.origin}

    @property
    def changed(self) -> bool:
        """Return whether both logs have a value and differ by more than rounding."""
        if not self.known:
            return False
        if self.difference is not None:
            return abs(self.difference) > self.slack
        return self.old.value != self.new.value

    @property
    def difference(self) -> float | None:
        """Return new minus old, or None unless both are numbers."""
        old = self.old.number
        new = self.new.number
        if old is None or new is None:
            return None
        return round(new - old, 9)

    @property
    def slack(self) -> float:
        """Return how much of the difference may be rounding."""
        return (self.old.slack + self.new.slack) * (1 + 1e-9) + (
            1e-9 if self.unit == "ratio" else 0
        )


RowsByName = Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Hold one sentence and its effect.

    ``kv_cache_bytes`` is its cause's effect on the KV cache (negative: less); None if unknown.
    """

    text: str
    kv_cache_bytes: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Record):
    """Hold two starts and their changes; ``unknown`` lists what the logs do not show."""

    old: ComparedStart
    new: ComparedStart
    headline: str
    rows: tuple[Row, ...]
    explanations: tuple[Explanation, ...]
    unknown: tuple[str, ...]

    @property
    def changes(self) -> tuple[Row, ...]:
        """Return the rows that both logs have with different values."""
        return tuple(row for row in self.rows if row.changed)

    @property
    def differs(self) -> bool:
        """Return whether anything changed: a row, or whether and how the start failed."""
        return bool(self.changes) or self.old.outcome != self.new.outcome
