"""Where the results of a function go that are records: a mapping or a tuple of fields, each with one entry a row."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from typing import Any

from oomguard.guarding.places import Place, place_for
from oomguard.guarding.rows import first_rows, is_record, lists_beside, rows_of


def place_of(part: Any, rows: int, total: int, pad_value: int | None, *, is_parked: bool) -> Place:
    """Return where the results of a call of ``total`` rows go, whose first part of ``rows`` rows gave ``part``."""
    if is_record(part, rows):
        return Record(part, rows, total, is_parked=is_parked)
    return place_for(part, rows, total, pad_value, is_parked=is_parked)


class Record:
    """A place for each field, and around them what the function gave."""

    def __init__(self, like: Any, rows: int, total: int, *, is_parked: bool) -> None:
        self._kind: Any = type(like)
        self._empty = _emptied(like) if isinstance(like, (dict, UserDict)) else None
        self._names = _names_in(like)
        self._beside: dict[str, list[Any]] = {name: [] for name in lists_beside(like)}
        self._done = 0
        self._places: list[Place] = [
            place_for(like[name], rows, total, None, is_parked=is_parked) for name in self._names
        ]

    def add(self, part: Any) -> str | None:
        """Put each field into its place; return why one cannot be."""
        beside = lists_beside(part)
        if type(part) is not self._kind or _names_in(part) != self._names or beside.keys() != self._beside.keys():
            return "its results have different fields"
        for name, place in zip(self._names, self._places, strict=True):
            problem = place.add(part[name])
            if problem is not None:
                return problem
        for name, entries in beside.items():
            self._beside[name] += entries
        self._done += rows_of(part[self._names[0]])
        return None

    @property
    def device_bytes(self) -> int:
        """Bytes that the fields hold on a device."""
        return sum(place.device_bytes for place in self._places)

    def park(self) -> None:
        """Move the fields to the host."""
        for place in self._places:
            place.park()

    def result(self) -> Any:
        """Return the record of all rows."""
        return self._made([place.result() for place in self._places])

    def finished(self) -> Any:
        """Return the record of the rows that all fields have."""
        return self._made([first_rows(place.finished(), self._done) for place in self._places])

    def _made(self, fields: list[Any]) -> Any:
        if issubclass(self._kind, Mapping):
            entries = dict(zip(self._names, fields, strict=True))
            if self._empty is None:
                return self._kind(entries)
            made = copy.copy(self._empty)
            made.update(entries)
            for name, beside in self._beside.items():
                setattr(made, name, list(beside))
            return made
        return self._kind(*fields) if hasattr(self._kind, "_fields") else self._kind(fields)


def _names_in(record: Any) -> list[Any]:
    return list(record) if isinstance(record, Mapping) else list(range(len(record)))


def _emptied(like: Any) -> Any:
    """Return an empty copy of a dict whose type is not made from entries (``defaultdict``) or keeps more; None of any other."""
    kind: Any = type(like)
    try:
        kind(())
    except Exception:  # noqa: BLE001 - a type of the user's
        is_made_of_entries = False
    else:
        is_made_of_entries = isinstance(like, dict)
    if is_made_of_entries:
        return None
    empty = copy.copy(like)
    empty.clear()
    return empty
