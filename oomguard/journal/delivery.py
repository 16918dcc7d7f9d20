"""Deliver outboxes to the shared journal: each attempt once, however often it is delivered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import JournalError
from oomguard.journal.location import JournalUrl
from oomguard.journal.outbox import (
    attempts_in,
    begun_in,
    delivered_of,
    left_behind,
    read_from,
    record_in,
    remove,
    waiting,
)
from oomguard.journal.postgres import PostgresDatabase, open_server, prepare
from oomguard.journal.record import Ran, Record
from oomguard.journal.write import write_begin, write_end

# Clocks that are kept in step differ by less, and so do the ways to the server and back.
_SAME_CLOCK_S: Final = 1.0


@dataclass(slots=True)
class Delivered:
    """How many attempts of how many runs were delivered; ``left`` says by path why a file stays.

    ``writing`` runs are still alive and deliver their own files.
    """

    attempts: int = 0
    runs: int = 0
    writing: int = 0
    left: dict[Path, str] = field(default_factory=dict)


def deliver(location: JournalUrl, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write records into a shared journal in one transaction, after migrating older tables.

    Raises:
        JournalError: it is away, does not permit that, or is of a newer oomguard. Nothing is
            written then.
    """
    begun, ran = set[str](), dict[str, Ran]()  # written once per run
    with open_server(location) as database, database.transaction():
        prepare(database)
        if rows:
            offset_s = _clock_offset_s(database)
        else:
            offset_s = 0.0
        for row in map(_without_nul, rows):
            session = row.get("session", "")
            record = record_in(row)
            if isinstance(record, Record):
                write_begin(database, record, offset_s, has_run=session in begun)
                begun.add(session)
            elif record is not None:
                number = row["number"]
                of_run = record.ran
                if of_run == ran.get(session):
                    ended = replace(record, ran=None)
                else:
                    ended = record
                if not write_end(database, session, number, ended, offset_s):
                    first = begun_in(row)
                    if first is not None:  # it was removed while it ran
                        write_begin(database, first, offset_s)
                        write_end(database, session, number, record, offset_s)
                if of_run is not None:
                    ran[session] = of_run


def deliver_left_behind(
    location: JournalUrl, most: int | None = None, is_over: Callable[[], bool] = lambda: False
) -> Delivered:
    """Deliver the outboxes of runs that have ended, oldest first.

    Args:
        location: the shared journal.
        most: at most this many; None: all.
        is_over: asked after each one; True ends it.

    Raises:
        JournalError: as ``deliver`` does.
        OSError: the files cannot be read.
    """
    done = Delivered()
    with left_behind(location.outbox) as files:
        for path, fd in files:
            try:
                rows, _end = read_from(fd, delivered_of(path, fd))
                if rows:
                    deliver(location, rows)
            except ValueError as error:
                done.left[path] = str(error)
                continue
            except JournalError as error:
                if not _is_about_a_record(error):
                    raise
                done.left[path] = str(error)
                continue
            remove(path)
            done.attempts, done.runs = done.attempts + attempts_in(rows), done.runs + bool(rows)
            if done.runs == most or is_over():
                break
    done.writing = sum(path not in done.left for path in waiting(location.outbox))
    return done


def require_tables(location: JournalUrl) -> None:
    """Give a shared journal this version's tables; raise JournalError if that is not possible."""
    deliver(location, ())


def _is_about_a_record(error: JournalError) -> bool:
    """Return whether the database refused one file's content; others may still be delivered."""
    import psycopg

    return isinstance(error.__cause__, (psycopg.DataError, psycopg.IntegrityError))


def _clock_offset_s(database: PostgresDatabase) -> float:
    """Return by how much the database's clock is ahead of this machine's; 0 if they are in step."""
    before = now()
    there = database.now()
    offset_s = there - (before + now()) / 2
    if abs(offset_s) >= _SAME_CLOCK_S:
        return offset_s
    return 0.0


def now() -> float:
    """Return the time of this machine's clock."""
    return time.time()


def _without_nul(value: Any) -> Any:
    """Return a value without the one character that PostgreSQL's text cannot hold."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {_without_nul(key): _without_nul(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nul(each) for each in value]
    return value
