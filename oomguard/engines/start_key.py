"""Represent what determines the memory of a server's start, however its command is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from oomguard.core.facts import FactValue


@dataclass(frozen=True, slots=True)
class StartKey:
    """What determines the memory of a server's start.

    Attributes:
        settings: the settings in the command by canonical name, with the model.
        others: all other parts of the command that take memory.
    """

    settings: Mapping[str, FactValue | None]
    others: frozenset[str]

    def is_same(self, other: StartKey, but: Collection[str]) -> bool:
        """Return whether both keys are the same, apart from the settings in ``but``."""
        mine, theirs = (
            {name: value for name, value in one.items() if name not in but}
            for one in (self.settings, other.settings)
        )
        return mine == theirs and self.others == other.others
