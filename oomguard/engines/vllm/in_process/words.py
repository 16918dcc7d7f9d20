"""What the processes of a start told, as lines: those that a log of the same start would have, in its form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from oomguard.observe.exceptions import exception_lines
from oomguard.observe.source import Line

Row = Mapping[str, Any]


def lines_of(rows: Iterable[Row], error: BaseException | None = None) -> tuple[Line, ...]:
    """Return all that was told, and behind it the lines of the exception that the start ended with."""
    texts = [text for row in rows for text in _texts(row)]
    if error is not None:
        texts += [line.text for line in exception_lines(error)]
    return _numbered(texts)


def last_words(rows: Sequence[Row]) -> tuple[Line, ...]:
    """Return the last traceback of each process but the one that starts the engine; it ended the process."""
    last = {row.get("pid"): row for row in rows if row.get("process") and row.get("traceback")}
    return _numbered([text for row in last.values() for text in _texts(row)])


def segments_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the shared memory that was made."""
    return [row["segment"] for row in rows if isinstance(row.get("segment"), str)]


def _texts(row: Row) -> Iterator[str]:
    if not isinstance(row.get("text"), str):
        return
    process = f"({row.get('process')} pid={row.get('pid')}) " if row.get("process") else ""
    head = f"{process}{row.get('level')} {row.get('stamp')} [{row.get('at')}] "
    told = row.get("traceback")
    for text in (row["text"], told if isinstance(told, str) else ""):
        for line in text.splitlines():
            yield head + line


def _numbered(texts: Iterable[str]) -> tuple[Line, ...]:
    return tuple(Line(number, 0, text) for number, text in enumerate(texts, 1))
