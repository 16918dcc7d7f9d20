"""A failed call with one thing of it done another way: what it would need so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oomguard.facts import FactValue


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of a failed call that may have another value.

    Attributes:
        now: its value when the call failed; None where it has none.
        need_bytes: returns what a number of rows needs with a value, by room; None where that cannot be told.
        why_not: why it can have no other value; None where it can.
        least: the value that needs least of those it can have.
        why_not_value: returns why it cannot have a value; None where it can.
        beside: returns the same with another setting changed too.
    """

    now: FactValue | None
    need_bytes: Callable[[FactValue, int, int], int | None]
    why_not: str | None = None
    least: FactValue = 1
    why_not_value: Callable[[FactValue], str | None] = lambda _value: None
    beside: Callable[[str, FactValue], Variant] | None = None
