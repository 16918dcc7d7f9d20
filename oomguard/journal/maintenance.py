"""Change what a journal holds: have ``--reuse`` skip runs, and remove old ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.core.errors import InputError, JournalError
from oomguard.journal.database import Database, in_parts, one_of
from oomguard.journal.liveness import is_alive
from oomguard.journal.location import JournalUrl, Location

_BUSY_S: Final = 10.0
# A run on another machine that has no end may still serve; after this long it counts as killed.
_UNHEARD_S: Final = 90 * 86400.0
_UNCHANGED: Final = "nothing is changed; try again when no other program uses it"
# Runs of which nothing began or ended since: host, when that was, and whether the last attempt
# ended.
_QUIET: Final = """
SELECT attempt.session, max(run.host), max(coalesce(attempt.ended_at, attempt.started_at)),
  max(CASE WHEN attempt.ended_at IS NOT NULL THEN attempt.number ELSE -1 END) = max(attempt.number)
FROM attempt LEFT JOIN run ON run.session = attempt.session
GROUP BY attempt.session
HAVING max(coalesce(attempt.ended_at, attempt.started_at)) < :moment"""


@dataclass(frozen=True, slots=True)
class Old:
    """What ``history --keep`` would do.

    Attributes:
        runs: how many the journal holds.
        old: how many ended longer ago than they are kept.
        not_ended: how many are as old, but have no end and stay.
    """

    runs: int
    old: int
    not_ended: int = 0


def forget(location: Location, numbers: Sequence[int]) -> None:
    """Have ``--reuse`` skip these runs; their records stay.

    Raises:
        InputError: the journal cannot be written.
    """
    with _changing(location) as database:
        for number in numbers:
            database.execute(
                "UPDATE run SET forgotten = 1 WHERE number = :number", {"number": number}
            )


def old_runs(location: Location, keep_s: float) -> Old:
    """Return how many runs ended longer ago than ``keep_s``, by the clock of the journal.

    Raises:
        InputError: the journal cannot be written.
    """
    with _changing(location) as database:
        old, not_ended = _old(database, keep_s)
        ((runs,),) = database.query("SELECT count(*) FROM run")
        return Old(int(runs), len(old), not_ended)


def remove_old(location: Location, keep_s: float) -> int:
    """Remove runs that ended longer ago than ``keep_s``, with their attempts; return how many.

    Raises:
        InputError: the journal cannot be written.
    """
    with _changing(location) as database:
        old, _not_ended = _old(database, keep_s)
        for part in in_parts(old):
            chosen, values = one_of(part)
            for table in ("attempt", "run"):
                database.execute(f"DELETE FROM {table} WHERE session IN {chosen}", values)  # noqa: S608
        return len(old)


def _old(database: Database, keep_s: float) -> tuple[list[str], int]:
    """Return the old runs, and how many others are as old but may be alive."""
    now = database.now()
    old = list[str]()
    not_ended = 0
    for session, host, last_at, is_ended in database.query(_QUIET, {"moment": now - keep_s}):
        alive = is_alive(session, host)
        if alive or (alive is None and not is_ended and last_at >= now - _UNHEARD_S):
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
            from oomguard.journal import sqlite

            with sqlite.open_file(location, _BUSY_S) as file:
                sqlite.prepare(file)
                with file.transaction():
                    yield file
    except JournalError as error:
        raise InputError(f"{location}: {error}", hint=error.hint or _UNCHANGED) from None
