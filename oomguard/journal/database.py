"""Connections to a journal's database, SQLite's or PostgreSQL's; what fails there is one JournalError in plain words."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool

from oomguard.errors import JournalError, UsageError
from oomguard.installation import install_hint
from oomguard.journal import sqlite_file
from oomguard.journal.grants import hint_of
from oomguard.journal.place import Place, Shared
from oomguard.report.json import json_line
from oomguard.report.mask import mask

# The tables have a schema of their own: a team's database has other tables, and other migrations.
SCHEMA_NAME: Final = "oomguard"
SERVER_TIME: Final = text("SELECT extract(epoch FROM clock_timestamp())")
_CONNECT_S: Final = 5  # at most; libpq waits two at least
# A server that answers no more is not waited for without end: the time of a statement, and of a dead connection.
_STATEMENT_S: Final = 30
_KEEPALIVES: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_JSON: Final[dict[str, Any]] = {"json_serializer": json_line, "json_deserializer": json.loads}


def sqlite_engine(path: Path, busy_s: float, *, reads_only: bool = False) -> Engine:
    """Return the engine of a file, which waits ``busy_s`` for others that hold it locked."""

    connect = functools.partial(sqlite_file.connect, path, busy_s, reads_only=reads_only)
    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool, **_JSON)
    if not reads_only:  # a read is over with its statement, and nobody is locked out after it
        event.listen(engine, "begin", _begin)
    return engine


def memory_engine() -> Engine:
    """Return the engine of an empty SQLite database in memory."""
    connect = functools.partial(sqlite3.connect, ":memory:", isolation_level=None)
    engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool, **_JSON)
    event.listen(engine, "begin", _begin)
    return engine


def postgresql_engine(shared: Shared, wait_s: float = _STATEMENT_S, *, reads_only: bool = False) -> Engine:
    """Return the engine of a shared database, which waits ``wait_s`` for each answer, and less for a connection.

    Raises:
        JournalError: psycopg is not installed.
        UsageError: the URL cannot be read.
    """
    if importlib.util.find_spec("psycopg") is None:
        raise JournalError(
            "PostgreSQL is reached through psycopg, which is not installed", hint=install_hint("postgres")
        )
    try:
        url = make_url(shared.libpq_url).set(drivername="postgresql+psycopg")
    except (ArgumentError, ValueError) as error:
        raise UsageError(f"--journal {shared}: {mask(str(error))}", hint=_FORM) from None
    options = f"-c search_path={SCHEMA_NAME} -c statement_timeout={round(max(wait_s, 1) * 1000)}"
    # A server that is asked whether it can be written to would say no of a session that only reads.
    by_transaction = reads_only and _asks_for_read_write(url)
    if reads_only and not by_transaction:
        options += " -c default_transaction_read_only=on"
    given = url.query.get("options")
    connect_s = round(min(max(wait_s, 2), _CONNECT_S))
    arguments: dict[str, Any] = {"connect_timeout": connect_s, "application_name": "oomguard", **_KEEPALIVES}
    arguments = {name: value for name, value in arguments.items() if name not in url.query}
    arguments["options"] = f"{given} {options}" if given else options
    if len(shared.hosts) > 1:  # tried in turn
        arguments["host"], arguments["port"] = (",".join(each) for each in zip(*shared.hosts, strict=True))
    engine = create_engine(url, poolclass=NullPool, connect_args=arguments, **_JSON)
    if by_transaction:
        return engine.execution_options(postgresql_readonly=True)
    return engine.execution_options(isolation_level="AUTOCOMMIT") if reads_only else engine


def _asks_for_read_write(url: URL) -> bool:
    given = url.query.get("target_session_attrs", os.environ.get("PGTARGETSESSIONATTRS"))
    return given == "read-write"


_FORM: Final = "--journal postgresql://USER@HOST/DATABASE"


@contextlib.contextmanager
def plainly(place: Place | None = None) -> Iterator[None]:
    """Turn what SQLAlchemy raises into a JournalError without SQL, parameters and passwords; what ``place`` does not permit has a hint."""
    try:
        yield
    except SQLAlchemyError as error:
        hint = hint_of(error, place) if isinstance(place, Shared) else None
        raise JournalError(words_of_error(error), hint=hint) from error


def words_of_error(error: SQLAlchemyError) -> str:
    """Return what the database said, in one line."""
    said = str(error.orig if isinstance(error, DBAPIError) and error.orig is not None else error)
    return mask(" ".join(said.split()))


def is_sqlite(connection: Connection) -> bool:
    """Return whether it is SQLite's: then rows are in the order in which attempts began here."""
    return connection.dialect.name == "sqlite"


def _begin(connection: Connection) -> None:
    # pysqlite begins late and not before each statement; writers then meet where neither can go on.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
