"""Open a journal in PostgreSQL (extra ``postgres``), and create or migrate its tables."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import JournalError, NoJournalError, UsageError
from oomguard.core.installation import install_hint
from oomguard.core.redact import mask
from oomguard.journal.database import NONE, SCHEMA_VERSION, Database, migrations, require_readable
from oomguard.journal.location import JournalUrl

if TYPE_CHECKING:
    import psycopg

# The tables are in a PostgreSQL schema of this name, because a team's database contains other
# tables too.
_SCHEMA: Final = "oomguard"
# libpq waits at least two seconds.
_CONNECT_S: Final = 5
_STATEMENT_S: Final = 30
_KEEPALIVES: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_PARAMETER: Final = re.compile(r"(?<!:):([a-z_][a-z0-9_]*)")
# Only one writer migrates the tables at a time; the number is arbitrary.
_LOCK: Final = "SELECT pg_advisory_xact_lock(7205759403792793)"
_HAS_SCHEMA: Final = "SELECT 1 FROM pg_namespace WHERE nspname = 'oomguard'"
# Tables with our names and their columns, even if this user may not read them.
_COLUMNS: Final = """
SELECT c.relname, coalesce(a.attname, '')
FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
WHERE n.nspname = 'oomguard' AND c.relname IN ('run', 'attempt', 'alembic_version')"""
_VERSION: Final = "SELECT version_num FROM oomguard.alembic_version"
# Columns of every PostgreSQL journal so far.
_OF_A_JOURNAL: Final = frozenset({("alembic_version", "version_num"), ("attempt", "session")})

# PostgreSQL's error codes insufficient_privilege and read_only_sql_transaction.
_DENIED: Final = "42501"
_READ_ONLY: Final = "25006"
_PLAIN_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*")


class PostgresDatabase(Database):
    """Run statements on a connection to a shared journal."""

    order = (
        # Rows arrive late, but their times come from the server's clock.
        "attempt.started_at, attempt.id"
    )

    def __init__(self, connection: psycopg.Connection[Any], *, read_only: bool) -> None:
        self._connection = connection
        self._read_only = read_only

    def query(self, sql: str, values: Mapping[str, Any] = NONE) -> list[tuple[Any, ...]]:  # noqa: D102
        with self._plain_errors():
            return self._run(sql, values).fetchall()

    def execute(self, sql: str, values: Mapping[str, Any] = NONE) -> int:  # noqa: D102
        with self._plain_errors():
            return self._run(sql, values).rowcount

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:  # noqa: D102
        with self._plain_errors(), self._connection.transaction():
            yield

    def now(self) -> float:  # noqa: D102
        ((now,),) = self.query(
            "SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
        )
        return float(now)

    def _run(self, sql: str, values: Mapping[str, Any]) -> psycopg.Cursor[Any]:
        # Without values, psycopg accepts several statements, and "%" as it is.
        if not values:
            return self._connection.execute(sql.encode())
        named = _PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))
        return self._connection.execute(named.encode(), values)

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        import psycopg

        try:
            yield
        except psycopg.Error as error:
            raise _journal_error(error, self._hint(error)) from error

    def _hint(self, error: psycopg.Error) -> str | None:
        """Return the missing grants, or which server to use; None for other errors."""
        if error.sqlstate == _READ_ONLY:
            return (
                "the server is read-only, like a standby; name the primary server, or several: "
                "--journal "
                "'postgresql://USER@HOST1,HOST2/DATABASE?target_session_attrs=read-write'"
            )
        if error.sqlstate != _DENIED:
            return None
        user = self._connection.info.user
        if not _PLAIN_NAME.fullmatch(user):
            user = '"{}"'.format(user.replace('"', '""'))
        on = "ALL TABLES IN SCHEMA oomguard"
        # The schema is missing, and this user may not create it.
        if not self._read_only and "database" in str(error):
            grants = [f"CREATE SCHEMA oomguard AUTHORIZATION {user}"]
        elif self._read_only:
            grants = [
                f"GRANT USAGE ON SCHEMA oomguard TO {user}",
                f"GRANT SELECT ON {on} TO {user}",
            ]
        else:
            grants = [
                f"GRANT USAGE ON SCHEMA oomguard TO {user}",
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON {on} TO {user}",
                f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA oomguard TO {user}",
            ]
        return "ask a database administrator to run: " + "; ".join(grants)


@contextlib.contextmanager
def open_server(
    location: JournalUrl, wait_s: float = _STATEMENT_S, *, read_only: bool = False
) -> Iterator[PostgresDatabase]:
    """Connect to a shared journal's database.

    Args:
        location: the URL.
        wait_s: seconds to wait for each answer, and at most 5 s for a connection.
        read_only: whether the server refuses every change.

    Raises:
        JournalError: if the extra is not installed or the server is unreachable; also for each
            statement.
        UsageError: if the URL cannot be read.
    """
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise JournalError(
            "a journal in PostgreSQL needs psycopg, which is not installed",
            hint=install_hint("postgres"),
        ) from None
    try:
        given = conninfo_to_dict(location.url)
    except psycopg.Error as error:
        hint = "--journal postgresql://USER@HOST/DATABASE"
        raise UsageError(f"--journal {location}: {mask(str(error).strip())}", hint=hint) from None
    options = f"-c search_path={_SCHEMA} -c statement_timeout={round(max(wait_s, 1) * 1000)}"
    connect_s = round(min(max(wait_s, 2), _CONNECT_S))
    arguments: dict[str, Any] = {
        "connect_timeout": connect_s,
        "application_name": "oomguard",
        **_KEEPALIVES,
    }
    for name, value in given.items():
        if value is not None:
            arguments[name] = value
    if given.get("options"):
        arguments["options"] = f"{given['options']} {options}"
    else:
        arguments["options"] = options
    try:
        connection = psycopg.connect(**arguments, autocommit=True)
    except psycopg.Error as error:
        raise _journal_error(error, None) from error
    with contextlib.closing(connection):
        database = PostgresDatabase(connection, read_only=read_only)
        # As a connection option, libpq would take a writable server for a standby.
        if read_only:
            database.execute("SET default_transaction_read_only = on")
        yield database


def version_of(database: PostgresDatabase) -> int:
    """Return the schema version; 0 if there are no tables yet.

    Raises:
        JournalError: if a newer oomguard or another program wrote the tables.
    """
    columns = set(database.query(_COLUMNS))
    if not columns:
        return 0
    if ("alembic_version", "version_num") in columns:
        rows = database.query(_VERSION)
    else:
        rows = []
    if rows:
        version = str(rows[0][0])
    else:
        version = ""
    if columns >= _OF_A_JOURNAL and version.isdecimal():
        return require_readable(int(version))
    tables = ", ".join(sorted({table for table, _column in columns}))
    raise NoJournalError(
        "not an oomguard journal: the schema oomguard contains another program's tables "
        f"({tables})",
        hint="use another database: --journal postgresql://USER@HOST/DATABASE",
    )


def prepare(database: PostgresDatabase) -> None:
    """Create this version's tables, or migrate older ones, in the caller's transaction.

    Every record is kept.

    Raises:
        JournalError: as in ``version_of``, or if the tables cannot be written.
    """
    # Checked without the lock, so that writers do not wait for each other.
    if version_of(database) == SCHEMA_VERSION:
        return
    database.execute(_LOCK)
    if not database.query(_HAS_SCHEMA):
        database.execute(f"CREATE SCHEMA {_SCHEMA}")
    for number, script in migrations("postgresql", version_of(database)):
        database.execute(script)
        database.execute("DELETE FROM alembic_version")
        database.execute("INSERT INTO alembic_version VALUES (:number)", {"number": str(number)})


def _journal_error(error: psycopg.Error, hint: str | None) -> JournalError:
    return JournalError(mask(" ".join(str(error).split())), hint=hint)
