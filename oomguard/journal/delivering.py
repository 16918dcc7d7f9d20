"""Bringing what waits on this machine into the shared journal: each attempt once, however often it is brought."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, IntegrityError

from oomguard.errors import JournalError
from oomguard.journal.database import SERVER_TIME, plainly, postgresql_engine
from oomguard.journal.place import Shared
from oomguard.journal.record import Ran, Record
from oomguard.journal.schema import prepare
from oomguard.journal.spool import (
    attempts_in,
    begun_in,
    delivered_of,
    folder_of,
    left_behind,
    read_from,
    record_in,
    remove,
    waiting,
)
from oomguard.journal.writing import write_begin, write_end

# Clocks that are kept in step differ by less, and so do the ways to the server and back.
_SAME_CLOCK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """How much was brought: attempts, of so many runs; ``writing`` runs go on, and deliver by themselves; why files stay, by path."""

    attempts: int = 0
    runs: int = 0
    writing: int = 0
    left: Mapping[Path, str] | None = None


def deliver(shared: Shared, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write records into a shared journal in one transaction, after giving it this version's tables where it has older ones.

    Raises:
        JournalError: it is away, does not permit that, or is of a newer oomguard; nothing of them is there then.
    """
    known, told_of = set[str](), dict[str, Ran]()  # what is written of a run once need not be written again
    with plainly(shared), _engine(shared).begin() as connection:
        prepare(connection)
        offset_s = _clock_offset_s(connection) if rows else 0.0
        for row in map(_as_postgresql_takes_it, rows):
            session, told = row.get("session", ""), record_in(row)
            if isinstance(told, Record):
                write_begin(connection, told, offset_s, has_run=session in known)
                known.add(session)
            elif told is not None:
                ended = replace(told, ran=None) if told.ran == told_of.get(session) else told
                is_there = write_end(connection, ended, (session, row["number"]), offset_s)
                if not is_there and (begun := begun_in(row)) is not None:  # it was removed while it ran
                    write_begin(connection, begun, offset_s)
                    write_end(connection, told, (session, row["number"]), offset_s)
                told_of |= {session: told.ran} if told.ran is not None else {}


def deliver_left_behind(
    shared: Shared, most: int | None = None, is_over: Callable[[], bool] = lambda: False
) -> Delivered:
    """Deliver what runs left behind that are over, the oldest first, ``most`` of them at most, and none once it ``is_over``.

    Raises:
        JournalError: as ``deliver`` does.
        OSError: what waits cannot be read.
    """
    attempts, runs, left = 0, 0, dict[Path, str]()
    with left_behind(folder_of(shared)) as files:
        for path, fd in files:
            try:
                rows, _end = read_from(fd, delivered_of(path, fd))
            except ValueError as error:
                left[path] = str(error)
                continue
            try:
                if rows:
                    deliver(shared, rows)
            except JournalError as error:
                if not isinstance(error.__cause__, (DataError, IntegrityError)):
                    raise  # of the database, not of this file
                left[path] = str(error)
                continue
            remove(path)
            attempts, runs = attempts + attempts_in(rows), runs + bool(rows)
            if runs == most or is_over():
                break
    still = [path for path in waiting(folder_of(shared)) if path not in left]
    return Delivered(attempts, runs, len(still), left)


@functools.lru_cache(maxsize=4)
def _engine(shared: Shared) -> Engine:
    """Return the engine, which asks a server what it is with its first connection only."""
    return postgresql_engine(shared)


def require_tables(shared: Shared) -> None:
    """Give a shared journal this version's tables; raise JournalError where that cannot be."""
    deliver(shared, ())


def _clock_offset_s(connection: Connection) -> float:
    """Return by how much the database's clock is ahead of this machine's; 0 where they are in step."""
    before = now()
    there = float(connection.execute(SERVER_TIME).scalar_one())
    offset_s = there - (before + now()) / 2
    return offset_s if abs(offset_s) >= _SAME_CLOCK_S else 0.0


def now() -> float:
    """Return the time of this machine's clock."""
    return time.time()


def _as_postgresql_takes_it(value: Any) -> Any:
    """Return a value without the one character that no text of PostgreSQL holds."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {_as_postgresql_takes_it(key): _as_postgresql_takes_it(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_postgresql_takes_it(each) for each in value]
    return value
