"""The runs of a journal: the last ones, those that failed, those of a command, or one in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select

from oomguard.exit_status import status_in_words
from oomguard.incident import Attempt
from oomguard.journal.contract import incident_of, listed, mapped, numbers_of, patch_of, values_of
from oomguard.journal.tables import ATTEMPT, RUN
from oomguard.past_runs import STOP_STATUSES, PastAttempt, PastRun

_AT_ONCE: Final = 500  # SQLite takes so many variables in any version
_COMMANDS_AT_ONCE: Final = 10_000
_MOST: Final = 2**63 - 1
_RUN: Final = tuple(
    RUN.c[name]
    for name in (
        *("number", "session", "original", "folder", "engine", "engine_version", "model", "device"),
        *("forgotten", "who", "host"),
    )
)
_ATTEMPT: Final = tuple(
    ATTEMPT.c[name]
    for name in (
        *("session", "number", "command", "settings", "patches", "predicted", "measured"),
        *("started_at", "ended_at", "exit_status", "error"),
    )
)
# Of a list kind, cause and ranks are enough: an incident holds pages of evidence.
_KIND: Final = ATTEMPT.c.incident["kind"].as_string()
_CAUSE: Final = ATTEMPT.c.incident[("causes", 0, "id")].as_string()
_RANKS: Final = ATTEMPT.c.incident["ranks"].as_json()


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


def each_run(database: Connection, asked: Asked, *, limit: int | None = None) -> Iterator[PastRun]:
    """Yield the runs as ``past_runs`` returns them, read a page at a time: nobody is locked out while they are shown.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: the database is damaged, locked or away.
    """
    left = _MOST if limit is None else limit
    while left > 0:
        runs = past_runs(database, asked, limit=min(left, _AT_ONCE))
        yield from runs
        left -= len(runs)
        if len(runs) < _AT_ONCE:
            return
        asked = replace(asked, before=runs[-1].number)


def past_runs(database: Connection, asked: Asked, *, limit: int | None = None) -> list[PastRun]:
    """Return the runs that are asked for, the newest first, at most ``limit`` of them; one that is asked by number in full.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: the database is damaged, locked or away.
    """
    if asked.number is not None and asked.number > _MOST:  # no database has such a number
        return []
    rows = _rows(database, asked, _MOST if limit is None else min(limit, _MOST))
    attempts = _attempts(database, [row.session for row in rows], in_full=asked.number is not None)
    return [_run(tuple(row), attempts[row.session]) for row in rows if row.session in attempts]


def _rows(database: Connection, asked: Asked, limit: int) -> list[Row[Any]]:
    if asked.command is None:
        return list(database.execute(_select(asked).limit(limit)).all())
    chosen = _numbers(database, asked, asked.command.casefold(), limit)
    parts = (chosen[at : at + _AT_ONCE] for at in range(0, len(chosen), _AT_ONCE))
    of_part = (select(*_RUN).where(RUN.c.number.in_(part)).order_by(RUN.c.number.desc()) for part in parts)
    return [row for query in of_part for row in database.execute(query)]


def _numbers(database: Connection, asked: Asked, folded: str, limit: int) -> list[int]:
    """Return the numbers of the runs whose command holds a text: no database folds every script's letters as Python does."""
    found, holds = list[int](), dict[str, bool]()  # many runs have one command
    while len(found) < limit:
        query = _select(asked).with_only_columns(RUN.c.number, RUN.c.original).limit(_COMMANDS_AT_ONCE)
        page = [(number, original) for number, original in database.execute(query)]
        for number, original in page:
            if original not in holds:
                holds[original] = folded in " ".join(words_of(original)).casefold()
            if holds[original]:
                found.append(number)
        if len(page) < _COMMANDS_AT_ONCE:
            break
        asked = replace(asked, before=page[-1][0])
    return found[:limit]


def _select(asked: Asked) -> Select[Any]:
    own = ATTEMPT.c.session == RUN.c.session
    has_attempts = select(ATTEMPT.c.id).where(own)
    if asked.since is not None:
        has_attempts = has_attempts.where(ATTEMPT.c.number == 1, ATTEMPT.c.started_at >= asked.since)
    chosen = select(*_RUN).where(has_attempts.exists()).order_by(RUN.c.number.desc())
    if asked.failed:
        chosen = chosen.where(_failed())
    if asked.number is not None:
        chosen = chosen.where(RUN.c.number == asked.number)
    if asked.before is not None:
        chosen = chosen.where(RUN.c.number < asked.before)
    return chosen


def _failed() -> ColumnElement[bool]:
    """Return the condition that a run failed: its last attempt decides."""
    last, attempt = ATTEMPT.alias("last"), ATTEMPT.alias("a")
    # Of the attempt's own session: the run is two levels out, where no subquery looks by itself.
    number = select(func.max(last.c.number)).where(last.c.session == attempt.c.session).scalar_subquery()
    ended_badly = (attempt.c.exit_status != 0) & attempt.c.exit_status.not_in(STOP_STATUSES)
    failed = attempt.c.incident.is_not(None) | (attempt.c.error != "") | ended_badly
    of_it = (attempt.c.session == RUN.c.session) & (attempt.c.number == number) & attempt.c.ended_at.is_not(None)
    return select(attempt.c.id).where(of_it, failed).exists()


def _attempts(database: Connection, sessions: list[str], *, in_full: bool) -> dict[str, tuple[PastAttempt, ...]]:
    found: dict[str, tuple[PastAttempt, ...]] = {}
    told = (ATTEMPT.c.incident,) if in_full else (ATTEMPT.c.incident.is_not(None), _KIND, _CAUSE, _RANKS)
    asked = select(*_ATTEMPT, *told).order_by(ATTEMPT.c.session, ATTEMPT.c.number)
    for part in (sessions[at : at + _AT_ONCE] for at in range(0, len(sessions), _AT_ONCE)):
        rows = database.execute(asked.where(ATTEMPT.c.session.in_(part)))
        for session, own in groupby(map(tuple, rows), key=lambda row: row[0]):
            alike = tuple(map(_attempt, own))
            found[session] = (*(replace(past, is_followed=True) for past in alike[:-1]), *alike[-1:])
    return found


def _run(row: Sequence[Any], attempts: tuple[PastAttempt, ...]) -> PastRun:
    number, session, original, folder, engine, version, model, device, forgotten, who, host = row
    of_it = (folder, engine, version, model, device, bool(forgotten), who, host)
    return PastRun(number, session, words_of(original), attempts, *of_it)


def _attempt(row: Sequence[Any]) -> PastAttempt:
    _session, number, command, settings, patches, predicted, measured, began_at, ended_at, status, error, *told = row
    said, why = _incident(*told), str(error or "")
    attempt = Attempt(
        number,
        values_of(mapped(settings)),
        tuple(patch_of(each) for each in listed(patches) if isinstance(each, dict)),
        incident_of(said) if said else None,
        status,
        why if why else "" if said or status in {0, None} else status_in_words(status),
        0.0 if ended_at is None else max(0.0, ended_at - began_at),
        numbers_of(mapped(measured)),
        ranks if isinstance(ranks := said.get("ranks"), dict) else None,
    )
    return PastAttempt(attempt, words_of(command), began_at, ended_at, numbers_of(mapped(predicted)), why)


def _incident(*told: Any) -> dict[str, Any]:
    """Return an incident that was read whole, or of which kind, cause and ranks were."""
    if len(told) == 1:
        return told[0] if isinstance(told[0], dict) else {}
    is_there, kind, cause, ranks = told
    return {"kind": kind, "causes": [{"id": cause}], "ranks": ranks} if is_there else {}


def words_of(text: str) -> tuple[str, ...]:
    """Return a command as the journal keeps it."""
    return tuple(str(word) for word in listed(text))
