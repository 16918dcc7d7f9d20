"""Changing what a journal holds, in a file and in a shared database: leaving runs alone, removing old ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, delete, func, select

from oomguard.errors import InputError, JournalError
from oomguard.journal.database import SERVER_TIME, is_sqlite, plainly, postgresql_engine, sqlite_engine
from oomguard.journal.place import Place, Shared
from oomguard.journal.schema import prepare
from oomguard.journal.store import Journal
from oomguard.journal.tables import ATTEMPT, RUN
from oomguard.journal.writing import write_forgotten

_BUSY_S: Final = 10.0
_UNCHANGED: Final = "nothing is changed; try again when nothing else holds it"


@dataclass(frozen=True, slots=True)
class Old:
    """How many runs a journal holds, and how many of them ended longer ago than they are kept."""

    runs: int
    old: int


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
        old = select(func.count()).select_from(_old(connection, keep_s).subquery())
        return Old(_number(connection, select(func.count()).select_from(RUN)), _number(connection, old))


def remove_old(place: Place, keep_s: float) -> int:
    """Remove runs that ended longer ago than ``keep_s``, with their attempts; return how many.

    Raises:
        InputError: the journal cannot be written.
    """
    with _changing(place) as connection:
        old = list(connection.execute(_old(connection, keep_s)).scalars())
        for part in (old[at : at + 500] for at in range(0, len(old), 500)):
            connection.execute(delete(ATTEMPT).where(ATTEMPT.c.session.in_(part)))
            connection.execute(delete(RUN).where(RUN.c.session.in_(part)))
        return len(old)


def _old(connection: Connection, keep_s: float) -> Select[Any]:
    """Return the query for the sessions of which nothing began or ended since."""
    now = time.time() if is_sqlite(connection) else float(connection.execute(SERVER_TIME).scalar_one())
    last = func.max(func.coalesce(ATTEMPT.c.ended_at, ATTEMPT.c.started_at))
    return select(ATTEMPT.c.session).group_by(ATTEMPT.c.session).having(last < now - keep_s)


def _number(connection: Connection, query: Select[Any]) -> int:
    return int(connection.execute(query).scalar_one())


@contextlib.contextmanager
def _changing(place: Place) -> Iterator[Connection]:
    try:
        if isinstance(place, Shared):
            engine = postgresql_engine(place)
        else:
            Journal(place)
            engine = sqlite_engine(place, _BUSY_S)
        with plainly(), engine.begin() as connection:
            if isinstance(place, Shared):
                prepare(connection)
            yield connection
    except JournalError as error:
        raise InputError(f"{place}: {error}", hint=error.hint or _UNCHANGED) from None
