"""A journal's file without SQLAlchemy, which takes a run longer to load than all else: opening it, making it, and what a write takes.

The statements are those of writing.py and tables.py, compiled ahead into sqlite.toml by scripts/journal_statements.py.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from oomguard.errors import JournalError
from oomguard.journal.schema_version import SCHEMA_VERSION, readable_in_sqlite
from oomguard.report.mask import mask

STATEMENTS: Final = Path(__file__).with_name("sqlite.toml")


def connect(path: Path, busy_s: float, *, reads_only: bool = False) -> sqlite3.Connection:
    """Return a connection that begins no transaction by itself and waits ``busy_s`` for others that hold the file locked."""
    # Not opened read-only: what a killed writer left half written is rolled back by who comes next.
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=busy_s, isolation_level=None)
    if reads_only:
        database.execute("PRAGMA query_only = ON")
    return database


@contextlib.contextmanager
def reads(path: Path, busy_s: float) -> Iterator[sqlite3.Connection]:
    """Open a file for reading; nobody is locked out longer than a statement takes.

    Raises:
        JournalError: it is locked, damaged or gone.
    """
    try:
        with contextlib.closing(connect(path, busy_s, reads_only=True)) as database:
            yield database
    except sqlite3.Error as error:
        raise JournalError(mask(" ".join(str(error).split()))) from error


@contextlib.contextmanager
def writes(path: Path, busy_s: float) -> Iterator[sqlite3.Connection]:
    """Open a file for one transaction.

    Raises:
        JournalError: it is locked, full, damaged or gone; nothing is changed then.
    """
    try:
        with contextlib.closing(connect(path, busy_s)) as database, database:
            database.execute("BEGIN IMMEDIATE")  # two that read first and then write would meet where neither can go on
            yield database
    except sqlite3.Error as error:
        raise JournalError(mask(" ".join(str(error).split()))) from error


@functools.cache
def statements() -> dict[str, str]:
    """Return the statements by name; the names of their parameters are those of the columns, behind ``new_``."""
    found: dict[str, str] = _compiled("statements")
    return found


def prepare_file(path: Path, busy_s: float) -> None:
    """Give a file this version's tables, where it has not got them; all of its records stay.

    Raises:
        JournalError: it cannot be written, a newer oomguard wrote it, or another program.
    """
    with reads(path, busy_s) as database:
        version, is_empty = _found(database)
    if is_empty:
        with writes(path, busy_s) as database:
            if _found(database)[1]:  # another may have been faster
                for statement in _compiled("schema"):
                    database.execute(statement)
        return
    if version == SCHEMA_VERSION:
        return
    from oomguard.journal.database import plainly, sqlite_engine
    from oomguard.journal.schema import prepare

    with plainly(), sqlite_engine(path, busy_s).begin() as connection:
        prepare(connection)


def _found(database: sqlite3.Connection) -> tuple[int, bool]:
    """Return a file's schema, and whether there is nothing in it."""
    ((version,),) = database.execute("PRAGMA user_version")
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return readable_in_sqlite(version, tables), not tables


def _compiled(part: str) -> Any:
    return tomllib.loads(STATEMENTS.read_text(encoding="utf-8"))[part]
