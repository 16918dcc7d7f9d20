"""When a line was printed: the stamps of collectors and loggers, those without a year or a zone read beside the file's own time."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Final

# A stamp in full, in front or inside a collector's object: CRI, Docker, kubectl --timestamps, journald, Python's logging, SGLang.
_FULL: Final = re.compile(
    r"(?<!\d)(?P<day>\d{4}-\d\d-\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?P<part>[.,]\d{1,9})?\s?(?P<zone>Z|[+-]\d\d:?\d\d)?(?!\d)"
)
# journalctl -o json and -o export: microseconds since 1970 (systemd.journal-fields(7)).
_JOURNALD: Final = re.compile(r"__REALTIME_TIMESTAMP(?:\"\s*:\s*\"?|=)(?P<microseconds>\d{15,17})(?!\d)")
# Stamps without a year: vLLM's logger, glog (NCCL, Ray's raylet before 2.0), syslog.
_SHORT: Final = (
    re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):? (?P<month>\d\d)-(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)"),
    re.compile(r"(?:^|[\s\[])[IWEF](?P<month>\d\d)(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)\.\d+"),
    re.compile(r"(?:^|\s)(?P<name>[A-Z][a-z]{2}) (?P<day>[ \d]\d) (?P<time>\d\d:\d\d:\d\d) \S"),
)
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# A clock may run ahead of the one that stamps the file by so much: a stamp without a year that lies later is last year's.
_AHEAD_S: Final = 36 * 3600


def moment_of(line: str, modified_at: float | None) -> float | None:
    """Return when a line says that it was printed, in Unix seconds; None where it has no stamp that can be read.

    A stamp without a zone is in this process's own. One without a year takes the last year in which it does not lie after the
    file's last change; without that (``modified_at`` None) it is not read.
    """
    if journald := _JOURNALD.search(line):
        return int(journald["microseconds"]) / 1e6
    if full := _FULL.search(line):
        fraction = (full["part"] or "").replace(",", ".")[:7]
        return _unix_s(f"{full['day']}T{full['time']}{fraction}{full['zone'] or ''}")
    for pattern in _SHORT:
        if modified_at is not None and (found := pattern.search(line)):
            return _of_year(found.groupdict(), modified_at)
    return None


def last_moment(lines: Iterable[str], modified_at: float | None) -> float | None:
    """Return the stamp of the last line that has one, None where none has."""
    found = (moment_of(line, modified_at) for line in reversed(list(lines)))
    return next((at for at in found if at is not None), None)


def _of_year(told: Mapping[str, str | None], modified_at: float) -> float | None:
    name = told.get("name")
    if name is not None and name not in _MONTHS:
        return None
    month = _MONTHS.index(name) + 1 if name else int(told["month"] or 0)
    year = datetime.datetime.fromtimestamp(modified_at).astimezone().year
    for candidate in (year + 1, year, year - 1):
        at = _unix_s(f"{candidate}-{month:02d}-{int(told['day'] or 0):02d}T{told['time']}")
        if at is not None and at <= modified_at + _AHEAD_S:
            return at
    return None


def _unix_s(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):  # a day that no month has, a year that no clock has
        return None
