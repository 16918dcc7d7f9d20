"""What a guarded function learned in one process, for the same function in the others of its job: on a shelf that they share."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

from oomguard.engines.across_processes import Shelf
from oomguard.engines.known import shelf
from oomguard.guarding.known_sizes import KnownSizes, Learned

_MOST_CHARS: Final = 65_536
_SHAPES: Final = ((str,), (str,), (int,), (int, type(None)), (int, float, type(None)), (dict,))


def share(name: str, known: KnownSizes) -> None:
    """Take what other processes learned of the function of this name, and tell them what this one learns; nothing without a shelf.

    What lies there is judged as a stranger's: a text that is no such table counts for nothing. No failure of the shelf reaches a call.
    """
    with contextlib.suppress(Exception):
        if (found := shelf()) is not None:
            known.take(_read(found.read(name)))
            known.on_learned = lambda learned: _tell(found, name, learned)


def _tell(on: Shelf, name: str, learned: Learned) -> None:
    with contextlib.suppress(Exception):
        on.write(name, json.dumps(learned))  # what another process writes at the same time is as good


def _read(text: str | None) -> list[Any]:
    if text is None or len(text) > _MOST_CHARS:
        return []
    rows = json.loads(text)
    return [row for row in rows if _is_row(row)] if isinstance(rows, list) else []


def _is_row(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) == len(_SHAPES)
        and all(
            isinstance(value, kinds) and not isinstance(value, bool) for value, kinds in zip(row, _SHAPES, strict=True)
        )
        and row[2] > 0
    )
