"""Read, forget and remove the runs of a journal, and find the settings that are known to work."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

from oomguard.core.errors import InputError, JournalError
from oomguard.core.facts import FactValue
from oomguard.core.files import open_regular
from oomguard.core.incident import Attempt, Patch
from oomguard.core.past_runs import STOP_STATUSES, KnownSettings, PastAttempt, PastRun
from oomguard.core.process import status_in_words
from oomguard.journal.codec import (
    incident_of,
    numbers_of,
    parse_list,
    parse_object,
    patch_of,
    values_of,
    words_of,
)
from oomguard.journal.database import (
    MOST_VALUES,
    SCHEMA_VERSION,
    Database,
    in_parts,
    one_of,
    open_copy,
    open_file,
    prepare,
    version_of,
)
from oomguard.journal.location import JournalUrl, Location, default_path
from oomguard.journal.store import is_alive

# A run on another machine without an end may still serve; after this time it counts as killed.
_SILENT_S: Final = 90 * 86400.0
_UNCHANGED: Final = "oomguard changed nothing; try again when no other program uses the journal"
# Runs without a begin or end since a moment: the host, the last time, and whether the last attempt
# ended.
_QUIET: Final = """
SELECT attempt.session, max(run.host), max(coalesce(attempt.ended_at, attempt.started_at)),
  max(CASE WHEN attempt.ended_at IS NOT NULL THEN attempt.number ELSE -1 END) = max(attempt.number)
FROM attempt LEFT JOIN run ON run.session = attempt.session
GROUP BY attempt.session
HAVING max(coalesce(attempt.ended_at, attempt.started_at)) < :moment"""


@dataclass(frozen=True, slots=True)
class OldRuns:
    """Count what ``history --keep`` would remove.

    Attributes:
        runs: the number of runs in the journal.
        old: the number of runs that ended too long ago.
        not_ended: the number of equally old runs without an end, which stay.
    """

    runs: int
    old: int
    not_ended: int = 0


def forget(location: Location, numbers: Sequence[int]) -> None:
    """Make ``--reuse`` skip these runs; their records stay.

    Raises:
        InputError: if the journal cannot be written.
    """
    with _changing(location) as database:
        for number in numbers:
            database.execute(
                "UPDATE run SET forgotten = 1 WHERE number = :number", {"number": number}
            )


def old_runs(location: Location, keep_s: float) -> OldRuns:
    """Count the runs that ended longer ago than ``keep_s`` seconds, by the journal's clock.

    Raises:
        InputError: if the journal cannot be written.
    """
    with _changing(location) as database:
        old, not_ended = _old(database, keep_s)
        ((runs,),) = database.query("SELECT count(*) FROM run")
        return OldRuns(int(runs), len(old), not_ended)


def remove_old(location: Location, keep_s: float) -> int:
    """Remove runs that ended longer ago than ``keep_s`` seconds; return their number.

    Raises:
        InputError: if the journal cannot be written.
    """
    with _changing(location) as database:
        old, _not_ended = _old(database, keep_s)
        for part in in_parts(old):
            chosen, values = one_of(part)
            for table in ("attempt", "run"):
                database.execute(f"DELETE FROM {table} WHERE session IN {chosen}", values)  # noqa: S608
        return len(old)


def _old(database: Database, keep_s: float) -> tuple[list[str], int]:
    """Return the old runs, and the number of equally old runs that may be alive."""
    now = database.now()
    old = list[str]()
    not_ended = 0
    for session, host, last_at, is_ended in database.query(_QUIET, {"moment": now - keep_s}):
        alive = is_alive(session, host)
        if alive or (alive is None and not is_ended and last_at >= now - _SILENT_S):
            not_ended += 1
        else:
            old.append(session)
    return old, not_ended


@contextlib.contextmanager
def _changing(location: Location) -> Iterator[Database]:
    try:
        if isinstance(location, JournalUrl):
            from oomguard.journal import postgres

            with postgres.open_server(location) as server, server.transaction():
                postgres.prepare(server)
                yield server
        else:
            with open_file(location, _BUSY_S) as file:
                prepare(file)
                with file.transaction():
                    yield file
    except JournalError as error:
        raise InputError(f"{location}: {error}", hint=error.hint or _UNCHANGED) from None


_BUSY_S: Final = 10.0
_ELSEWHERE: Final = "choose another journal with --journal PATH"
_AWAY: Final = (
    "until the database is back, each machine keeps its own records: the next run delivers them, "
    "or oomguard history --deliver"
)
_COMMANDS_AT_ONCE: Final = 10_000
_MOST: Final = 2**63 - 1
_RUN: Final = (
    "run.number, run.session, run.original, run.folder, run.engine, run.engine_version, run.model, "
    "run.device,"
    " run.forgotten, run.who, run.host"
)
_ATTEMPT: Final = (
    "session, number, command, settings, patches, predicted, measured, started_at, ended_at, "
    "exit_status, error,"
    " CAST(incident AS text)"
)
# The last attempt decides whether a run failed.
_FAILED: Final = f"""EXISTS (
SELECT 1 FROM attempt AS a
WHERE a.session = run.session AND a.ended_at IS NOT NULL
  AND a.number = (SELECT max(number) FROM attempt AS last WHERE last.session = a.session)
  AND (a.incident IS NOT NULL OR a.error <> ''
    OR (a.exit_status <> 0 AND a.exit_status NOT IN ({", ".join(map(str, STOP_STATUSES))}))))"""  # noqa: S608


@contextlib.contextmanager
def open_journal(
    location: Location | None = None, *, busy_s: float = _BUSY_S
) -> Iterator[Database | None]:
    """Open a journal for reading, without changing it.

    An older file is copied into memory and migrated there. The result is None if the user's own
    file does not exist, or if a shared database has no tables yet.

    Args:
        location: the journal; None for the user's own file.
        busy_s: seconds to wait for a locked file, and for each answer of a server.

    Raises:
        InputError: if it is missing, unreadable, locked, damaged, unreachable, too new, or not a
            journal.
    """
    where = location or default_path()
    try:
        if isinstance(where, JournalUrl):
            with _open_shared(where, busy_s) as database:
                yield database
            return
        if location is None and not where.exists():
            yield None
            return
        # SQLite would wait for a FIFO.
        open_regular(where).close()
        with open_file(where, busy_s, read_only=True) as file:
            if version_of(file) == SCHEMA_VERSION:
                yield file
                return
            with open_copy(file) as copy:
                prepare(copy)
                yield copy
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}", hint=_ELSEWHERE) from None
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: a record is not JSON: {error}", hint=_damaged(where)) from None
    except JournalError as error:
        raise InputError(f"{where}: {error}", hint=error.hint or _hint(where, str(error))) from None


@contextlib.contextmanager
def _open_shared(location: JournalUrl, wait_s: float) -> Iterator[Database | None]:
    from oomguard.journal.postgres import open_server, version_of

    with open_server(location, wait_s, read_only=True) as database:
        version = version_of(database)
        if 0 < version < SCHEMA_VERSION:
            raise JournalError(
                f"its tables have schema {version}, but this oomguard reads {SCHEMA_VERSION}",
                hint=(
                    "the next oomguard run that writes there migrates them, or: oomguard history "
                    "--deliver"
                ),
            )
        yield database if version else None


def _hint(where: Location, error: str) -> str:
    if isinstance(where, JournalUrl):
        return _AWAY
    if "locked" in error or "busy" in error:
        return "another program has locked it; try again when that program has ended"
    if "malformed" in error:
        return _damaged(where)
    return _ELSEWHERE


def _damaged(where: Location) -> str:
    if isinstance(where, JournalUrl):
        return "another program has written to it"
    old = shlex.quote(str(where))
    new = shlex.quote(f"{where}.damaged")
    return f"the file is damaged; move it away, and the next run creates a new one: mv {old} {new}"


@dataclass(frozen=True, slots=True)
class RunQuery:
    """Select runs.

    Attributes:
        command: only runs whose command contains this text (case-insensitive); None for all.
        since: only runs that began after this time, in Unix seconds; None for all.
        failed: only runs that failed in the end.
        number: only this run; None for all.
        before: only runs with a lower number; None for all.
    """

    command: str | None = None
    since: float | None = None
    failed: bool = False
    number: int | None = None
    before: int | None = None


def each_run(database: Database, asked: RunQuery, *, limit: int | None = None) -> Iterator[PastRun]:
    """Yield the runs of ``past_runs`` a page at a time, so that no writer is locked out.

    Raises:
        JournalError: if the database is damaged, locked or unreachable.
    """
    if limit is None:
        left = _MOST
    else:
        left = limit
    while left > 0:
        runs = past_runs(database, asked, limit=min(left, MOST_VALUES))
        yield from runs
        left -= len(runs)
        if len(runs) < MOST_VALUES:
            return
        asked = replace(asked, before=runs[-1].number)


def past_runs(database: Database, asked: RunQuery, *, limit: int | None = None) -> list[PastRun]:
    """Return the selected runs, newest first; a run selected by number is complete.

    Raises:
        JournalError: if the database is damaged, locked or unreachable.
    """
    # SQLite has no larger integer.
    if asked.number is not None and asked.number > _MOST:
        return []
    rows = _runs(database, asked, _MOST if limit is None else min(limit, _MOST))
    attempts = _attempts(database, [row[1] for row in rows], in_full=asked.number is not None)
    found = []
    for row in rows:
        if row[1] in attempts:
            found.append(_run(row, attempts[row[1]]))
    return found


def _runs(database: Database, asked: RunQuery, limit: int) -> list[tuple[Any, ...]]:
    if asked.command is None:
        return _select(database, _RUN, asked, limit)
    rows = []
    for part in in_parts(_numbers(database, asked, asked.command.casefold(), limit)):
        chosen, values = one_of(part)
        sql = f"SELECT {_RUN} FROM run WHERE number IN {chosen} ORDER BY number DESC"  # noqa: S608
        rows += database.query(sql, values)
    return rows


def _numbers(database: Database, asked: RunQuery, folded: str, limit: int) -> list[int]:
    """Return the runs whose command contains a text; only Python folds the case of every script."""
    # Many runs have the same command.
    found, contains = list[int](), dict[str, bool]()
    while len(found) < limit:
        page = _select(database, "run.number, run.original", asked, _COMMANDS_AT_ONCE)
        for number, original in page:
            if original not in contains:
                contains[original] = folded in " ".join(words_of(original)).casefold()
            if contains[original]:
                found.append(number)
        if len(page) < _COMMANDS_AT_ONCE:
            break
        asked = replace(asked, before=page[-1][0])
    return found[:limit]


def _select(database: Database, columns: str, asked: RunQuery, limit: int) -> list[tuple[Any, ...]]:
    attempts = "SELECT 1 FROM attempt WHERE attempt.session = run.session"
    if asked.since is not None:
        attempts += " AND attempt.number = 1 AND attempt.started_at >= :since"
    conditions = [f"EXISTS ({attempts})"]
    if asked.failed:
        conditions.append(_FAILED)
    if asked.number is not None:
        conditions.append("run.number = :number")
    if asked.before is not None:
        conditions.append("run.number < :before")
    chosen = " AND ".join(conditions)
    sql = f"SELECT {columns} FROM run WHERE {chosen} ORDER BY run.number DESC LIMIT :limit"  # noqa: S608
    values = {"since": asked.since, "number": asked.number, "before": asked.before, "limit": limit}
    return database.query(sql, values)


def _attempts(
    database: Database, sessions: list[str], *, in_full: bool
) -> dict[str, tuple[PastAttempt, ...]]:
    found: dict[str, tuple[PastAttempt, ...]] = {}
    for part in in_parts(sessions):
        chosen, values = one_of(part)
        sql = f"SELECT {_ATTEMPT} FROM attempt WHERE session IN {chosen} ORDER BY session, number"  # noqa: S608
        for session, own in groupby(database.query(sql, values), key=lambda row: row[0]):
            attempts = [_attempt(row, in_full=in_full) for row in own]
            found[session] = (
                *(replace(past, is_followed=True) for past in attempts[:-1]),
                attempts[-1],
            )
    return found


def _patches(text: str) -> Iterator[Patch]:
    """Yield the patches of a JSON column; anything else in it is left out."""
    for row in parse_list(text):
        if isinstance(row, dict):
            yield patch_of(row)


def _run(row: Sequence[Any], attempts: tuple[PastAttempt, ...]) -> PastRun:
    number, session, original, folder, engine, version, model, device, forgotten, who, host = row
    rest = (folder, engine, version, model, device, bool(forgotten), who, host)
    return PastRun(number, session, words_of(original), attempts, *rest)


def _attempt(row: Sequence[Any], *, in_full: bool) -> PastAttempt:
    (
        _,
        number,
        command,
        settings,
        patches,
        predicted,
        measured,
        began_at,
        ended_at,
        status,
        error,
        incident,
    ) = row
    failure = parse_object(incident)
    why = str(error or "")
    ranks = failure.get("ranks")
    # a list shows kind, cause and ranks, but an incident contains pages of evidence
    if not in_full:
        for name in failure.keys() - {"kind", "causes"}:
            del failure[name]
    attempt = Attempt(
        number,
        values_of(parse_object(settings)),
        tuple(_patches(patches)),
        incident_of(failure) if failure else None,
        status,
        why if why else "" if failure or status in {0, None} else status_in_words(status),
        0.0 if ended_at is None else max(0.0, ended_at - began_at),
        numbers_of(parse_object(measured)),
        ranks if isinstance(ranks, dict) else None,
    )
    return PastAttempt(
        attempt, words_of(command), began_at, ended_at, numbers_of(parse_object(predicted)), why
    )


# 1 for an attempt that worked, 0 for one that ran out of memory, otherwise NULL. An attempt worked
# if it ended well, or if its user stopped it after its engine had printed its memory figures. Any
# other failure, including a hang, counts as NULL.
_HELD: Final = f"""CASE
WHEN attempt.ended_at IS NULL THEN NULL
WHEN attempt.incident IS NOT NULL THEN 0
WHEN attempt.error <> '' THEN NULL
WHEN attempt.exit_status = 0 THEN 1
WHEN attempt.exit_status IN ({", ".join(map(str, STOP_STATUSES))}) AND attempt.measured <> '{{}}' THEN 1
END"""
# Only the last 20,000 attempts of runs that are not forgotten, so that a start does not wait for a
# journal of years. If a run does not record whether masking hid more than secrets, a mask inside a
# word may, and other commands would look the same.
_TRIED: Final = f"""
WITH tried AS (
  SELECT attempt.id, attempt.settings, run.original, run.folder, run.files,
    run.engine, run.engine_version, run.device,
    {_HELD} AS held, row_number() OVER (ORDER BY {{order}}) AS moment
  FROM attempt JOIN run ON run.session = attempt.session
  WHERE run.forgotten = 0 AND attempt.id > (SELECT max(id) FROM attempt) - 20000
    AND (run.hides_secrets_alone = 1
      OR (run.hides_secrets_alone IS NULL AND replace(run.original, '"***"', '') NOT LIKE '%***%'))
), alike AS (
  SELECT original, folder, files, settings, engine, engine_version, device,
    max(CASE WHEN held = 1 THEN moment END) AS last_held, sum(held) AS held, sum(1 - held) AS failed,
    max(CASE WHEN held = 0 THEN moment END) AS last_failed
  FROM tried WHERE held IS NOT NULL
  GROUP BY original, folder, files, settings, engine, engine_version, device
)
SELECT alike.original, alike.folder, alike.files, alike.settings,
  alike.engine, alike.engine_version, alike.device,
  alike.last_held, alike.held, alike.failed, alike.last_failed, tried.id
FROM alike LEFT JOIN tried ON tried.moment = alike.last_held"""  # noqa: S608
_LAST_RUN: Final = """
SELECT run.number, run.session, run.original, run.who, run.host,
  attempt.number, attempt.started_at, attempt.measured
FROM attempt JOIN run ON run.session = attempt.session WHERE attempt.id = :id"""
_PATCHES: Final = (
    "SELECT patches FROM attempt WHERE session = :session AND number <= :number ORDER BY number"
)
_SET_BY_USER: Final = """
SELECT attempt.set_by_user FROM attempt JOIN run ON run.session = attempt.session
WHERE run.original = :original AND attempt.set_by_user IS NOT NULL ORDER BY attempt.id"""
_BY_MODEL: Final = f"""
WITH tried AS (
  SELECT run.model, run.engine, run.engine_version, run.device, attempt.settings, run.who, run.host,
    {_HELD} AS held, attempt.started_at
  FROM attempt JOIN run ON run.session = attempt.session
  WHERE run.forgotten = 0 AND run.engine IS NOT NULL AND attempt.started_at >= :since
)
SELECT model, engine, engine_version, device, settings, who, host,
  sum(held), sum(1 - held), min(started_at), max(started_at)
FROM tried WHERE held IS NOT NULL
GROUP BY model, engine, engine_version, device, settings, who, host"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class KnownGood:
    """Hold changes under which a command ran.

    Attributes:
        original: the command before any patch, with secrets masked.
        folder: the working directory; None if unknown.
        files: the digest of the files that it names; None without files.
        engine: the engine that the output names; None if it names none.
        engine_version: the version that the engine printed; None if it printed none.
        device: name and size of the GPUs; None if unknown.
        settings: everything that was changed, by setting; empty if the command ran as given.
        held: how often it worked.
        failed: how often it ran out of memory.
        has_failed_since: whether it ran out of memory after it last worked.
        last_id: its last attempt that worked.
        last_held: the position of that attempt in the order of attempts.
        last_failed: the position of the last failed attempt; None if none failed.
    """

    original: tuple[str, ...]
    folder: str | None
    files: str | None
    engine: str | None
    engine_version: str | None
    device: str | None
    settings: Mapping[str, FactValue]
    held: int
    failed: int
    has_failed_since: bool
    last_id: int
    last_held: int = 0
    last_failed: int | None = None


@dataclass(frozen=True, slots=True)
class KnownRun:
    """Describe the last run that worked.

    Attributes:
        number: the number that the user types.
        began_at: when it began, in Unix seconds.
        patches: the last change of each setting.
        measured: facts and the values that it measured.
        set_by_user: whether the user had set each setting.
        who: who ran it; None if not recorded.
        host: on which machine; None if not recorded.
    """

    number: int
    began_at: float
    patches: Mapping[str, Patch]
    measured: Mapping[str, float]
    set_by_user: Mapping[str, bool | None]
    who: str | None = None
    host: str | None = None


def known_to_work(database: Database) -> list[KnownGood]:
    """Return known-good settings from the last 20,000 attempts, latest success first.

    A failure without a recorded engine, version or device counts for each that it may belong to.
    """
    found = []
    for known in tried_before(database):
        if known.held:
            found.append(known)
    return found


def tried_before(database: Database) -> list[KnownGood]:
    """Return ``known_to_work`` followed by settings that never worked."""
    groups = []
    for row in database.query(_TRIED.replace("{order}", database.order)):
        groups.append(_Group(tuple(row[:4]), tuple(row[4:7]), *row[7:]))
    failures: dict[tuple[Any, ...], list[_Group]] = {}
    for group in groups:
        if group.last_failed is not None:
            failures.setdefault(group.started, []).append(group)
    known = [_known(group, failures.get(group.started, [])) for group in groups]
    return sorted(known, key=lambda one: one.last_held, reverse=True)


def last_run(database: Database, known: KnownGood) -> KnownRun:
    """Return the last run in which these settings worked.

    Each of its patches spans from the value before any change to the last value. It has the highest
    effect of all changes in between.
    """
    (row,) = database.query(_LAST_RUN, {"id": known.last_id})
    number, session, original, who, host, attempt, began_at, measured = row
    patches: dict[str, Patch] = {}
    for (text,) in database.query(_PATCHES, {"session": session, "number": attempt}):
        for patch in _patches(text):
            first = patches.get(patch.setting, patch)
            patches[patch.setting] = replace(
                patch, old=first.old, effect=max(first.effect, patch.effect)
            )
    chosen: dict[str, Any] = {}
    for (text,) in database.query(_SET_BY_USER, {"original": original}):
        chosen |= parse_object(text)
    return KnownRun(
        number, began_at, patches, numbers_of(parse_object(measured)), chosen, who, host
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Group attempts with the same command, folder, files, changes, engine and device."""

    started: tuple[Any, ...]
    ran_on: tuple[str | None, ...]
    last_held: int | None
    held: int
    failed: int
    last_failed: int | None
    last_id: int | None

    def may_be(self, other: _Group) -> bool:
        for a, b in zip(self.ran_on, other.ran_on, strict=True):
            if not (a is None or b is None or a == b):
                return False
        return True


def _known(group: _Group, failures: list[_Group]) -> KnownGood:
    original, folder, files, settings = group.started
    engine, version, device = group.ran_on
    same = []
    for other in failures:
        if group.may_be(other):
            same.append(other)
    last_failed = max((other.last_failed or 0 for other in same), default=0)
    return KnownGood(
        words_of(original),
        folder,
        files,
        engine,
        version,
        device,
        values_of(parse_object(settings)),
        int(group.held),
        sum(int(other.failed) for other in same),
        has_failed_since=last_failed > (group.last_held or 0),
        last_id=group.last_id or 0,
        last_held=group.last_held or 0,
        last_failed=last_failed or None,
    )


def known_settings(
    database: Database, *, model: str | None = None, since: float | None = None
) -> list[KnownSettings]:
    """Return settings that worked or ran out of memory, by model, engine version and device.

    The latest measurement comes first.

    Args:
        database: a journal.
        model: only models whose name contains this text (case-insensitive); None for all.
        since: only measurements after this time, in Unix seconds; None for all.
    """
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in database.query(_BY_MODEL, {"since": 0.0 if since is None else since}):
        if model is None or model.casefold() in str(row[0] or "").casefold():
            groups.setdefault(row[:5], []).append(row[5:])
    found = (_entry(what, rows) for what, rows in groups.items())
    return sorted(found, key=lambda entry: entry.last_at, reverse=True)


def _entry(what: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> KnownSettings:
    model, engine, version, device, settings = what
    by: Counter[tuple[str | None, str | None]] = Counter()
    for who, host, held, failed, _first_at, _last_at in rows:
        by[who, host] += int(held + failed)
    return KnownSettings(
        model,
        engine,
        version,
        device,
        values_of(parse_object(settings)),
        sum(int(row[2]) for row in rows),
        sum(int(row[3]) for row in rows),
        measured_by=tuple((who, host, count) for (who, host), count in by.most_common()),
        first_at=min(row[4] for row in rows),
        last_at=max(row[5] for row in rows),
    )
