"""The file of told causes: how somebody who wrote a failure down names its cause beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard.rules.table import Table


@dataclass(frozen=True, slots=True)
class ToldCause:
    """Words that name a cause beside a failure.

    Attributes:
        cause: the cause, as the rules call it.
        words: literals in lower case; the pattern is tried where one of them stands.
        pattern: the words.
        unless: words of the same sentence or of one beside it that say otherwise, None where there are none.
        examples: texts in which it is named.
        others: texts in which it is not.
    """

    cause: str
    words: tuple[str, ...]
    pattern: Any
    unless: Any
    examples: tuple[str, ...]
    others: tuple[str, ...]


def read_told(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> list[ToldCause]:
    """Read a file of told causes; ``make`` turns a pattern's text into a pattern. Raises RuleError for a mistake in it."""

    def pattern(row: Table, name: str) -> Any:
        return make(row.get(name), path=str(path), key=f"{row.key}.{name}")

    return [
        ToldCause(
            cause=row.get("cause"),
            words=tuple(row.get("words")),
            pattern=pattern(row, "pattern"),
            unless=pattern(row, "unless") if row.get("unless", "") else None,
            examples=tuple(row.get("examples")),
            others=tuple(row.get("others", ())),
        )
        for row in Table(raw, path, "", "told causes").tables("told", "told cause")
    ]
