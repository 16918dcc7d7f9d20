"""What decides the memory of a server's start, whoever words it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from oomguard.core.facts import FactValue


@dataclass(frozen=True, slots=True)
class StartKey:
    """What decides the memory of a server's start, whoever words it.

    Attributes:
        settings: those that the command itself gives, the model among them, by canonical name.
        others: all else in it that takes memory.
    """

    settings: Mapping[str, FactValue | None]
    others: frozenset[str]

    def is_same(self, other: StartKey, but: Collection[str]) -> bool:
        """Return whether both are the same but for these settings."""
        mine, theirs = (
            {name: value for name, value in one.items() if name not in but}
            for one in (self.settings, other.settings)
        )
        return mine == theirs and self.others == other.others
