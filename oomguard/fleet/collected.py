"""When a collector took a line: the time in the object that it made of it (Loki, Google Cloud, Vector, CloudWatch, fluent-bit, Docker).

The object may stand on one line, or be one of an array that is written out over several. What the line itself says in it, as vLLM's stamp
without a zone, is the engine's.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

# The fields of collectors and loggers that tell the time of a line, in the order of how sure they are.
_FIELDS: Final = ("__REALTIME_TIMESTAMP", "@timestamp", "timestamp", "_time", "time", "ts", "date", "asctime")
_MEMBER: Final = re.compile(r'(?P<indent>\s+)"(?P<name>[\w@]+)"\s*:\s*(?P<value>"[^"]*"|\d+(?:\.\d+)?)\s*,?\s*$')
_INDENT: Final = re.compile(r'(?P<indent>\s+)"[\w@]+"\s*:')
# Times since 1970 in nanoseconds (Loki), microseconds (journald), milliseconds (CloudWatch) and seconds are told apart by their size.
_SCALES: Final = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (5e8, 1.0))


def time_of_object(line: str) -> float | None:
    """Return the time in the object of a line, in Unix seconds; None where the line is no object with one."""
    try:
        record = json.loads(line) if line.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    within = (value for value in record.values() if isinstance(value, dict))
    return next((at for each in (record, *within) if (at := _time_in(each)) is not None), None)


def time_beside(lines: Sequence[str], at: int) -> float | None:
    """Return the time in the object whose fields are written out on lines, one of them ``lines[at]``; in Unix seconds, None without one."""
    own = _INDENT.match(lines[at])
    if own is None:
        return None
    indent = own["indent"]
    fields: dict[str, Any] = {}
    for some in (reversed(lines[:at]), lines[at + 1 :]):
        fields |= _members(some, indent)
    return _time_in(fields)


def _members(lines: Iterable[str], indent: str) -> dict[str, Any]:
    """Return the plain fields with this indent, as far as the lines do not leave the object."""
    found: dict[str, Any] = {}
    for line in lines:
        if not line.startswith(indent):
            break
        member = _MEMBER.match(line)
        if member is not None and member["indent"] == indent:
            found[member["name"]] = json.loads(member["value"]) if "\\" not in member["value"] else None
    return found


def _time_in(record: Mapping[str, Any]) -> float | None:
    return next((at for name in _FIELDS if (at := _unix_s(record.get(name))) is not None), None)


def _unix_s(value: Any) -> float | None:
    try:
        if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
            return datetime.datetime.fromisoformat(value.strip().replace(",", ".")).timestamp()
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError, OSError):
        return None
    return next((number / scale for least, scale in _SCALES if least <= number < least * 1e3), None)
