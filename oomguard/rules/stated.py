"""The file of stated figures: how people and programs state a device's size, and what of it is free, beside a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard.kinds import KINDS
from oomguard.rules.table import Table


@dataclass(frozen=True, slots=True)
class StatedFigure:
    """Words that state a figure of the machine; no failure is told by them.

    Attributes:
        words: literals in lower case; the pattern is tried on a line that holds one of them.
        pattern: the words, their groups named after facts.
        unless_behind: what must not stand before them in their sentence: advice, a need, another machine.
        nominal: a size as it is sold, which a driver's own figure is below.
        lines_above: how many lines above, blank ones left out, stand before the line in what is looked at.
        kinds: the failures whose memory it speaks of; empty for those of a device.
        examples: texts that state one.
        others: texts that state none.
    """

    words: tuple[str, ...]
    pattern: Any
    unless_behind: Any
    nominal: bool
    lines_above: int
    kinds: tuple[str, ...]
    examples: tuple[str, ...]
    others: tuple[str, ...]


def read_stated(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> list[StatedFigure]:
    """Read a file of stated figures; ``make`` turns a pattern's text into a pattern. Raises RuleError for a mistake in it."""
    table = Table(raw, path, "", "stated figures")
    unless = make(table.get("unless_behind"), path=str(path), key="unless_behind")
    return [_figure(row, path, make, unless) for row in table.tables("stated", "stated figure")]


def _figure(row: Table, path: Path, make: Callable[..., Any], unless: Any) -> StatedFigure:
    nominal = bool(row.get("nominal", False))
    return StatedFigure(
        words=tuple(row.get("words")),
        pattern=make(row.get("pattern"), path=str(path), key=f"{row.key}.pattern"),
        unless_behind=unless if nominal else None,
        nominal=nominal,
        lines_above=row.get("lines_above", 0),
        kinds=row.choices("kinds", KINDS, "kind"),
        examples=tuple(row.get("examples")),
        others=tuple(row.get("others", ())),
    )
