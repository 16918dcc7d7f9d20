"""The frozen records of a comparison: two starts, the rows that tell them apart, and what explains those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oomguard.facts import FactValue
from oomguard.incident import Incident, StartUp

Kind = Literal["version", "setting", "default", "budget", "capacity"]
Unit = Literal["", "bytes", "tokens", "ratio"]
# Where a value comes from; "left alone" has none to show, "not printed" is unknown.
Origin = Literal["set", "printed", "default", "solved", "left alone", "not printed"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two starts compared; ``starts`` is how many the log holds, ``incident`` the failure of this one."""

    source: str
    start: StartUp
    incident: Incident | None = None
    starts: int = 1
    notes: tuple[str, ...] = ()

    def number(self, name: str) -> float | None:
        """The value of a numeric fact of the start, None where it is unknown."""
        fact = self.start.facts.get(name)
        return None if fact is None or isinstance(fact.value, (str, bool)) else fact.value

    def value(self, name: str) -> FactValue | None:
        """The value of any fact of the start, None where it is unknown."""
        fact = self.start.facts.get(name)
        return None if fact is None else fact.value

    @property
    def version(self) -> str | None:
        """The version of the engine as the log prints it, None where it does not."""
        own = self.start.framework_version or self.value("framework_version")
        return None if own is None else str(own)

    @property
    def outcome(self) -> str:
        """``worked``, or the kind of the failure."""
        return "worked" if self.incident is None else self.incident.kind

    @property
    def utilization(self) -> float | None:
        """The share of the device that the engine may take, None where the log does not tell."""
        own = self.number("gpu_memory_utilization_ratio")
        return own if own is not None else self.number("mem_fraction_static_ratio")


@dataclass(frozen=True, slots=True)
class Value:
    """One side of a row: ``value`` is None where it is unknown or was left alone; ``slack`` is in the row's unit."""

    value: FactValue | None
    origin: Origin = "printed"
    slack: float = 0.0

    @property
    def number(self) -> float | None:
        """The value where it is a number."""
        return None if isinstance(self.value, (str, bool)) else self.value


@dataclass(frozen=True, slots=True)
class Row:
    """One thing compared. A row of which one side is not printed tells no change."""

    name: str
    kind: Kind
    old: Value
    new: Value
    unit: Unit = ""

    @property
    def known(self) -> bool:
        """Whether both logs tell it."""
        return "not printed" not in {self.old.origin, self.new.origin}

    @property
    def changed(self) -> bool:
        """Whether both logs tell it, and differently: by more than the rounding of what they print."""
        if not self.known:
            return False
        if self.difference is not None:
            return abs(self.difference) > self.slack
        return self.old.value != self.new.value

    @property
    def difference(self) -> float | None:
        """New less old, None where one of them is no number."""
        old, new = self.old.number, self.new.number
        return None if old is None or new is None else round(new - old, 9)

    @property
    def slack(self) -> float:
        """How much of the difference may be rounding."""
        return (self.old.slack + self.new.slack) * (1 + 1e-9) + (1e-9 if self.unit == "ratio" else 0)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One sentence; ``kv_cache_bytes`` is what it gives the KV cache (negative: takes from it), None where it does not say."""

    text: str
    kv_cache_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two starts and what changed between them; ``unknown`` says what the logs leave open."""

    old: Side
    new: Side
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
