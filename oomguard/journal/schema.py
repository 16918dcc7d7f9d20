"""Which schema a database has, and giving it this version's; a newer one is left alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, inspect, text

from oomguard.journal.database import SCHEMA_NAME, is_sqlite
from oomguard.journal.schema_version import SCHEMA_VERSION, readable_in_sqlite, require_journal
from oomguard.journal.tables import METADATA, VERSION

_MIGRATIONS: Final = Path(__file__).with_name("migrations")
# Alembic keeps what it is about in its own module; and who migrates a server's tables does it alone (any number will do).
_ONE_AT_A_TIME: Final = threading.Lock()
_LOCK: Final = text("SELECT pg_advisory_xact_lock(7205759403792793)")
_HAS_SCHEMA: Final = text("SELECT 1 FROM pg_namespace WHERE nspname = :name").bindparams(name=SCHEMA_NAME)
# What has the names of our tables, with its columns, also where this user may not read it; beside them others may have tables there.
_COLUMNS: Final = text(
    "SELECT c.relname, coalesce(a.attname, '') FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid "
    "LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 "
    "WHERE n.nspname = :name AND c.relname IN ('run', 'attempt', 'alembic_version')"
).bindparams(name=SCHEMA_NAME)
_VERSION: Final = text(f"SELECT version_num FROM {SCHEMA_NAME}.{VERSION.name}")  # noqa: S608 - a schema that may not be used is an error


def version_of(connection: Connection) -> int:
    """Return the schema of a database, 0 of an empty one.

    Raises:
        JournalError: a newer oomguard wrote it, or another program.
    """
    return _of_sqlite(connection) if is_sqlite(connection) else _of_postgresql(connection)


def prepare(connection: Connection) -> None:
    """Give a database this version's tables, where it has not got them; all of its records stay.

    Raises:
        JournalError: as ``version_of``.
        sqlalchemy.exc.SQLAlchemyError: it cannot be written.
    """
    if not is_sqlite(connection):
        if (
            version_of(connection) == SCHEMA_VERSION
        ):  # to lock it each time would have all who write wait for one another
            return
        connection.execute(_LOCK)
        if connection.execute(_HAS_SCHEMA).first() is None:
            connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA_NAME}")
    version = version_of(connection)  # another may have been faster
    if version == SCHEMA_VERSION:
        return
    if version == 0 and not inspect(connection).get_table_names():
        METADATA.create_all(connection)  # as the migrations make it, which a test holds; they take a second to load
        connection.execute(VERSION.insert().values(version_num=str(SCHEMA_VERSION)))
    else:
        _migrate(connection, version)
    if is_sqlite(connection):
        connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _migrate(connection: Connection, version: int) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _ONE_AT_A_TIME:
        if version and not inspect(connection).has_table(VERSION.name):  # of before there were migrations
            command.stamp(config, str(version))
        command.upgrade(config, "head")


def _of_sqlite(connection: Connection) -> int:
    version = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    found = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")
    return readable_in_sqlite(version, set(found.scalars()))


def _of_postgresql(connection: Connection) -> int:
    columns = {(table, column) for table, column in connection.execute(_COLUMNS)}
    if not columns:
        return 0
    has_version = (VERSION.name, VERSION.c.version_num.name) in columns
    return require_journal(columns, connection.execute(_VERSION).scalar() if has_version else None)
