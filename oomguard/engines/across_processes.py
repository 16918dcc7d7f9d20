"""What an engine that spreads one job over many processes tells one of them of the others."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class KilledBefore(NamedTuple):
    """That what runs now was killed for memory before: which run of it this is, how often, and by whom."""

    run: str
    times: int
    by: str


class Shelf(Protocol):
    """Where the processes of one job leave short texts for each other."""

    def read(self, name: str) -> str | None:
        """Return the text of this name, None where there is none."""

    def write(self, name: str, text: str) -> None:
        """Leave a text under this name, in the place of an earlier one."""
