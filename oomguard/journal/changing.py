"""Changing what a journal holds, in a file and in a shared database: leaving runs alone, removing old ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, case, delete, func, select

from oomguard.errors import InputError, JournalError
from oomguard.journal.database import SERVER_TIME, is_sqlite, plainly, postgresql_engine, sqlite_engine
from oomguard.journal.going import goes_on
from oomguard.journal.place import Place, Shared
from oomguard.journal.schema import prepare
from oomguard.journal.store import Journal
from oomguard.journal.tables import ATTEMPT, RUN
from oomguard.journal.writing import write_forgotten

_BUSY_S: Final = 10.0
# A run of another machine that has begun and not ended may serve on; after so long it is taken for killed.
_UNHEARD_S: Final = 90 * 86400.0
_UNCHANGED: Final = "nothing is changed; try again when nothing else holds it"


@dataclass(frozen=True, slots=True)
class Old:
    """How many runs a journal holds, how many of them ended longer ago than they are kept, and how many have no end and stay for it."""

    runs: int
    old: int
    not_ended: int = 0


def forget(place: Place, numbers: Sequence[int]) -> None:
    """Have ``--reuse`` leave these runs alone; what they were stays written.

    Raises:
        InputError: the journal cannot be written.
    """
    with _changing(place) as connection:
        write_forgotten(connection, numbers)


def old_runs(place: Place, keep_s: float) -> Old:
    """Return how many runs ended longer ago than ``keep_s``, by the clock of the database.

    Raises:
        InputError: the journal cannot be written.
    """
    with _changing(place) as connection:
        old, not_ended = _old(connection, keep_s)
        return Old(int(connection.execute(select(func.count()).select_from(RUN)).scalar_one()), len(old), not_ended)


def remove_old(place: Place, keep_s: float) -> int:
    """Remove runs that ended longer ago than ``keep_s``, with their attempts; return how many.

    Raises:
        InputError: the journal cannot be written.
    """
    with _changing(place) as connection:
        old, _not_ended = _old(connection, keep_s)
        for part in (old[at : at + 500] for at in range(0, len(old), 500)):
            connection.execute(delete(ATTEMPT).where(ATTEMPT.c.session.in_(part)))
            connection.execute(delete(RUN).where(RUN.c.session.in_(part)))
        return len(old)


def _old(connection: Connection, keep_s: float) -> tuple[list[str], int]:
    """Return the sessions of which nothing began or ended since, and how many more there are that have no end and may go on."""
    now = time.time() if is_sqlite(connection) else float(connection.execute(SERVER_TIME).scalar_one())
    old, not_ended = list[str](), 0
    for session, host, last_at, is_ended in connection.execute(_heard_before(now - keep_s)):
        going = goes_on(session, host)
        if going or (going is None and not is_ended and last_at >= now - _UNHEARD_S):
            not_ended += 1
        else:
            old.append(session)
    return old, not_ended


def _heard_before(moment: float) -> Select[Any]:
    """Return the query for the sessions of which nothing began or ended since: their hosts, when that was, and whether the last ended."""
    last = func.max(func.coalesce(ATTEMPT.c.ended_at, ATTEMPT.c.started_at))
    of_ended = func.max(case((ATTEMPT.c.ended_at.is_not(None), ATTEMPT.c.number), else_=-1))
    of_it = ATTEMPT.c.session, func.max(RUN.c.host), last, of_ended == func.max(ATTEMPT.c.number)
    there = ATTEMPT.join(RUN, RUN.c.session == ATTEMPT.c.session, isouter=True)
    return select(*of_it).select_from(there).group_by(ATTEMPT.c.session).having(last < moment)


@contextlib.contextmanager
def _changing(place: Place) -> Iterator[Connection]:
    try:
        if isinstance(place, Shared):
            engine = postgresql_engine(place)
        else:
            Journal(place)
            engine = sqlite_engine(place, _BUSY_S)
        with plainly(place), engine.begin() as connection:
            if isinstance(place, Shared):
                prepare(connection)
            yield connection
    except JournalError as error:
        raise InputError(f"{place}: {error}", hint=error.hint or _UNCHANGED) from None
