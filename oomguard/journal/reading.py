"""Reading a journal that others write, without changing it: any schema up to this version's, and clear words for what is none."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from oomguard.errors import InputError, JournalError
from oomguard.journal.database import memory_engine, postgresql_engine, sqlite_engine, words_of_error
from oomguard.journal.grants import hint_of
from oomguard.journal.place import Place, Shared, default_path
from oomguard.journal.schema import prepare, version_of
from oomguard.journal.schema_version import SCHEMA_VERSION
from oomguard.regular_file import open_regular

_BUSY_S: Final = 10.0
_ELSEWHERE: Final = "--journal PATH names another one"
_AWAY: Final = (
    "what runs write meanwhile waits on their machines: the next run there brings it, or oomguard history --deliver"
)


@contextlib.contextmanager
def reading(place: Place | None = None, *, busy_s: float = _BUSY_S) -> Iterator[Connection | None]:
    """Open a journal for reading; the connection has the tables of this version.

    An older file is copied into memory and migrated there, so that a folder that cannot be written is read too.

    Args:
        place: the journal; None: the user's own, of which there may be none yet (None is yielded then, and for a shared database
            that nobody has written to).
        busy_s: how long to wait for others that hold a file locked, and for each answer of a shared database.

    Raises:
        InputError: it is missing, is not readable, is locked, is damaged, is away, or is no journal of this version or before.
    """
    where = place or default_path()
    try:
        if isinstance(where, Shared):
            with _shared(where, busy_s) as database:
                yield database
            return
        if place is None and not where.exists():
            yield None
            return
        open_regular(where).close()  # a FIFO would be waited for
        with sqlite_engine(where, busy_s, reads_only=True).connect() as file, _of_this_version(file) as database:
            yield database
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or error}", hint=_ELSEWHERE) from None
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: a record is no JSON: {error}", hint=_damaged(where)) from None
    except SQLAlchemyError as error:
        raise InputError(f"{where}: {words_of_error(error)}", hint=_hint(where, error)) from None
    except JournalError as error:
        raise InputError(f"{where}: {error}", hint=error.hint or _ELSEWHERE) from None


@contextlib.contextmanager
def _shared(shared: Shared, wait_s: float) -> Iterator[Connection | None]:
    with postgresql_engine(shared, wait_s, reads_only=True).connect() as database:
        version = version_of(database)
        if 0 < version < SCHEMA_VERSION:
            raise JournalError(
                f"its tables are of schema {version}, this oomguard reads {SCHEMA_VERSION}",
                hint="the next oomguard run that writes there migrates them, or: oomguard history --deliver",
            )
        yield database if version else None


@contextlib.contextmanager
def _of_this_version(file: Connection) -> Iterator[Connection]:
    if version_of(file) == SCHEMA_VERSION:
        yield file
        return
    with memory_engine().begin() as copy:
        source, target = file.connection.driver_connection, copy.connection.driver_connection
        if source is not None and target is not None:
            copy.exec_driver_sql("COMMIT")  # a backup begins what it needs by itself
            source.backup(target)
            copy.exec_driver_sql("BEGIN")
        prepare(copy)
        yield copy


def _hint(place: Place, error: SQLAlchemyError) -> str:
    if isinstance(place, Shared):
        return hint_of(error, place, reads_only=True) or _AWAY
    said = words_of_error(error)
    if "locked" in said or "busy" in said:
        return "another program holds it; try again when that has ended"
    if "malformed" in said:
        return _damaged(place)
    return _ELSEWHERE


def _damaged(place: Place) -> str:
    if not isinstance(place, Path):
        return "somebody else has written it"
    old, new = shlex.quote(str(place)), shlex.quote(f"{place}.damaged")
    return f"it is damaged; keep it apart, and the next run begins a new one: mv {old} {new}"
