"""What the processes of a start told, as lines: those that a log of the same start would have, in its form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from oomguard.observe.exceptions import exception_lines
from oomguard.observe.source import Line

Row = Mapping[str, Any]
# vllm/logging_utils/dump_input.py.
_SCHEDULED: Final = re.compile(r"scheduler output.*\bnum_scheduled_tokens=\{([^}]+)\}", re.DOTALL)


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


def in_the_last_step(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the requests of the step at which an engine died, by the scheduler's output that vLLM dumps; empty where it did not."""
    told = (row["text"] for row in reversed(rows) if isinstance(row.get("text"), str))
    found = next((match for text in told if (match := _SCHEDULED.search(text))), None)
    return () if found is None else tuple(one.rpartition(": ")[0] for one in found[1].split(", "))


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
