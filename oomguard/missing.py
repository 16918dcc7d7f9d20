"""What would decide a failure whose cause the text leaves open: one thing, and the command that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from oomguard.records import Record


@dataclass(frozen=True, slots=True, repr=False)
class Missing(Record):
    """One thing to find out; ``command`` shows it, and stands as it is pasted."""

    what: str
    command: str
