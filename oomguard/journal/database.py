"""Define the interface of an open journal database, SQLite or PostgreSQL.

Queries are plain SQL for both, with ``:name`` parameters. The differences are in ``sqlite.py``,
``postgres.py`` and the folders of ``migrations/``.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from oomguard.core.errors import JournalError, NoJournalError

# The schema that this version writes. Its migrations are migrations/<dialect>/1.sql, 2.sql, ...
SCHEMA_VERSION: Final = 5
# Every SQLite allows at least 999 variables in one statement.
MOST_VALUES: Final = 500
NONE: Final[Mapping[str, Any]] = {}
_MIGRATIONS: Final = Path(__file__).with_name("migrations")


class Database(ABC):
    """Run statements on a connection; errors become JournalErrors of one line without passwords."""

    # The columns that sort attempts by their start.
    order: ClassVar[str]

    @abstractmethod
    def query(self, sql: str, values: Mapping[str, Any] = NONE) -> list[tuple[Any, ...]]:
        """Run a query and return its rows."""

    @abstractmethod
    def execute(self, sql: str, values: Mapping[str, Any] = NONE) -> int:
        """Run a statement and return the number of changed rows."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Commit everything at the end, or nothing if the block raises."""

    @abstractmethod
    def now(self) -> float:
        """Return the time of the clock that the journal's times come from, in Unix seconds."""


def migrations(dialect: Literal["sqlite", "postgresql"], version: int) -> Iterator[tuple[int, str]]:
    """Yield number and SQL of each migration after schema ``version``, in order."""
    numbers = sorted(int(path.stem) for path in (_MIGRATIONS / dialect).glob("*.sql"))
    for number in numbers:
        if number > version:
            path = _MIGRATIONS / dialect / f"{number}.sql"
            yield number, path.read_text(encoding="utf-8")


def require_readable(version: int) -> int:
    """Return the version.

    Raises:
        JournalError: if a newer oomguard wrote the journal.
    """
    if version > SCHEMA_VERSION:
        from oomguard.core.installation import upgrade_hint

        raise JournalError(
            f"written by a newer oomguard (schema {version}, this one reads {SCHEMA_VERSION})",
            hint=upgrade_hint(),
        )
    return version


def one_of(values: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """Return the right side of ``column IN`` for at most MOST_VALUES values, and its parameters."""
    named = {f"value_{at}": value for at, value in enumerate(values)}
    return f"({', '.join(f':{name}' for name in named)})", named


def in_parts(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the values in groups that fit into one statement."""
    for at in range(0, len(values), MOST_VALUES):
        yield values[at : at + MOST_VALUES]


# Open a journal in an SQLite file, and create or migrate its tables.


class SqliteDatabase(Database):
    """Run statements on a file, or on a copy of one in memory."""

    # Attempts are written when they begin, so their ids are in order of time.
    order = "attempt.id"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def query(self, sql: str, values: Mapping[str, Any] = NONE) -> list[tuple[Any, ...]]:  # noqa: D102
        with _plain_errors():
            return self.connection.execute(sql, values).fetchall()

    def execute(self, sql: str, values: Mapping[str, Any] = NONE) -> int:  # noqa: D102
        with _plain_errors():
            return self.connection.execute(sql, values).rowcount

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:  # noqa: D102
        # IMMEDIATE, because two writers that both begin by reading could never continue.
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            # SQLite may have rolled back already.
            with contextlib.suppress(sqlite3.Error):
                self.connection.rollback()
            raise

    def now(self) -> float:  # noqa: D102
        return time.time()


@contextlib.contextmanager
def open_file(path: Path, busy_s: float, *, read_only: bool = False) -> Iterator[SqliteDatabase]:
    """Open a journal's file; each statement waits ``busy_s`` seconds for other writers.

    Raises:
        JournalError: if the file is locked, full, damaged or missing; also for each statement.
    """
    # Not in SQLite's read-only mode, because the next reader rolls back the write of a killed
    # process.
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with _plain_errors():
        connection = sqlite3.connect(uri, uri=True, timeout=busy_s, isolation_level=None)
    with contextlib.closing(connection):
        database = SqliteDatabase(connection)
        if read_only:
            database.execute("PRAGMA query_only = ON")
        yield database


@contextlib.contextmanager
def open_copy(database: SqliteDatabase) -> Iterator[SqliteDatabase]:
    """Open a copy of a journal in memory."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
        with _plain_errors():
            database.connection.backup(copy)
        yield SqliteDatabase(copy)


def version_of(database: SqliteDatabase) -> int:
    """Return the schema version; 0 for an empty file.

    Raises:
        JournalError: if a newer oomguard or another program wrote the file.
    """
    ((version,),) = database.query("PRAGMA user_version")
    tables = {name for (name,) in database.query("SELECT name FROM sqlite_master")}
    if require_readable(version) == 0 and not tables:
        return 0
    if "attempt" not in tables:
        raise NoJournalError("this is another program's database, not a journal")
    return int(version)


def prepare(database: SqliteDatabase) -> None:
    """Create the tables of this version, or migrate older ones; every record is kept.

    Raises:
        JournalError: as in ``version_of``, or if the file cannot be written.
    """
    if version_of(database) == SCHEMA_VERSION:
        return
    with database.transaction():
        for number, script in migrations("sqlite", version_of(database)):
            for statement in _statements(script):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {number}")


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script, because ``executescript`` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        from oomguard.core.redact import mask

        raise JournalError(mask(" ".join(str(error).split()))) from error
