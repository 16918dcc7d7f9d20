"""The runs of a journal: the last ones, those that failed, those of a command, or one in full."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Final

from oomguard.exit_status import status_in_words
from oomguard.incident import Attempt
from oomguard.journal.contract import incident_of, listed, mapped, numbers_of, patch_of, values_of
from oomguard.past_runs import STOP_STATUSES, PastAttempt, PastRun

# The last attempt of each run decides how it ended.
_FAILED: Final = """
EXISTS (SELECT 1 FROM attempt a WHERE a.session = run.session
  AND a.number = (SELECT max(number) FROM attempt WHERE session = run.session)
  AND a.ended_at IS NOT NULL AND (a.incident IS NOT NULL OR a.error <> '' OR (a.exit_status <> 0 AND a.exit_status NOT IN ({stops}))))"""
_RUNS: Final = """
SELECT number, session, original, folder, engine, engine_version, model, device, forgotten FROM run
WHERE EXISTS (SELECT 1 FROM attempt a WHERE a.session = run.session{since}) {where}
ORDER BY number DESC {limit}"""
_ATTEMPTS: Final = """
SELECT session, number, command, settings, patches, {incident}, predicted, measured, started_at, ended_at, exit_status, error
FROM attempt WHERE session IN ({sessions}) ORDER BY session, number"""
# Of a list kind and cause are enough: an incident holds pages of evidence.
_SHORT_INCIDENT: Final = """
CASE WHEN incident IS NOT NULL THEN json_object('kind', json_extract(incident, '$.kind'),
  'causes', json_array(json_object('id', json_extract(incident, '$.causes[0].id')))) END"""
_AT_ONCE: Final = 500  # SQLite takes so many variables in any version
_MOST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """Which runs: their command holds ``command`` in any case, they began after ``since`` (Unix seconds), failed in the end, are
    of that ``number``, or of one ``before``.
    """

    command: str | None = None
    since: float | None = None
    failed: bool = False
    number: int | None = None
    before: int | None = None


def each_run(database: sqlite3.Connection, asked: Asked, *, limit: int | None = None) -> Iterator[PastRun]:
    """Yield the runs as ``past_runs`` returns them, read a page at a time: nobody is locked out while they are shown.

    Raises:
        sqlite3.Error: the file is damaged or locked.
    """
    left = _MOST if limit is None else limit
    while left > 0:
        runs = past_runs(database, asked, limit=min(left, _AT_ONCE))
        yield from runs
        left -= len(runs)
        if len(runs) < _AT_ONCE:
            return
        asked = replace(asked, before=runs[-1].number)


def past_runs(database: sqlite3.Connection, asked: Asked, *, limit: int | None = None) -> list[PastRun]:
    """Return the runs that are asked for, the newest first, at most ``limit`` of them; one that is asked by number in full.

    Raises:
        sqlite3.Error: the file is damaged or locked.
    """
    if asked.number is not None and asked.number > _MOST:  # SQLite has no such number
        return []
    where, values, since = list[str](), list[Any](), ""
    if asked.since is not None:
        since = " AND a.number = 1 AND a.started_at >= ?"
        values.append(asked.since)
    if asked.command is not None:
        where.append("holds(original)")
        database.create_function("holds", 1, partial(_holds, asked.command.casefold()), deterministic=True)
    if asked.failed:
        where.append(_FAILED.format(stops=", ".join(map(str, STOP_STATUSES))))
    if asked.number is not None:
        where.append("number = ?")
        values.append(asked.number)
    if asked.before is not None:
        where.append("number < ?")
        values.append(asked.before)
    rows = database.execute(
        _RUNS.format(
            since=since,
            where="".join(f" AND {condition}" for condition in where),
            limit="" if limit is None else f"LIMIT {min(limit, _MOST)}",
        ),
        values,
    ).fetchall()
    attempts = _attempts(database, [row[1] for row in rows], in_full=asked.number is not None)
    return [_run(row, attempts[row[1]]) for row in rows if row[1] in attempts]


def _holds(folded: str, original: str) -> bool:
    return folded in " ".join(words_of(original)).casefold()


def _attempts(
    database: sqlite3.Connection, sessions: list[str], *, in_full: bool
) -> dict[str, tuple[PastAttempt, ...]]:
    found: dict[str, tuple[PastAttempt, ...]] = {}
    for part in (sessions[at : at + _AT_ONCE] for at in range(0, len(sessions), _AT_ONCE)):
        query = _ATTEMPTS.format(
            incident="incident" if in_full else _SHORT_INCIDENT, sessions=", ".join("?" for _ in part)
        )
        for session, rows in groupby(database.execute(query, part), key=lambda row: row[0]):
            alike = tuple(map(_attempt, rows))
            found[session] = (*(replace(past, is_followed=True) for past in alike[:-1]), *alike[-1:])
    return found


def _run(row: tuple[Any, ...], attempts: tuple[PastAttempt, ...]) -> PastRun:
    number, session, original, folder, engine, version, model, device, forgotten = row
    of_it = (folder, engine, version, model, device, bool(forgotten))
    return PastRun(number, session, words_of(original), attempts, *of_it)


def _attempt(row: tuple[Any, ...]) -> PastAttempt:
    _session, number, command, settings, patches, incident, predicted, measured, began_at, ended_at, status, error = row
    said, why = mapped(incident), str(error or "")
    attempt = Attempt(
        number,
        values_of(mapped(settings)),
        tuple(patch_of(each) for each in listed(patches) if isinstance(each, dict)),
        incident_of(said) if said else None,
        status,
        why if why else "" if said or status in {0, None} else status_in_words(status),
        0.0 if ended_at is None else max(0.0, ended_at - began_at),
        numbers_of(mapped(measured)),
    )
    return PastAttempt(attempt, words_of(command), began_at, ended_at, numbers_of(mapped(predicted)), why)


def words_of(text: str) -> tuple[str, ...]:
    """Return a command as the journal keeps it."""
    return tuple(str(word) for word in listed(text))
