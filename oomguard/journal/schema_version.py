"""The schema that this version writes and reads; a newer one is left alone, and so is another program's database."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, Final

from oomguard.errors import JournalError, NoJournalError
from oomguard.installation import upgrade_hint

SCHEMA_VERSION: Final = 5
# What every journal in PostgreSQL has had: Alembic's table, and the attempts.
_OF_A_JOURNAL: Final = frozenset({("alembic_version", "version_num"), ("attempt", "session")})


def readable(version: int) -> int:
    """Return a database's schema.

    Raises:
        JournalError: a newer oomguard wrote it.
    """
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"written by a newer oomguard (schema {version}, this one reads {SCHEMA_VERSION})", hint=upgrade_hint()
        )
    return version


def readable_in_sqlite(version: int, tables: AbstractSet[str]) -> int:
    """Return the schema of a file by its ``PRAGMA user_version`` and its tables, 0 of an empty one.

    Raises:
        JournalError: a newer oomguard wrote it, or another program.
    """
    if readable(version) == 0 and not tables:
        return 0
    if "attempt" not in tables:
        raise NoJournalError("a database of another program, no journal")
    return version


def require_journal(columns: AbstractSet[tuple[str, str]], version: Any) -> int:
    """Return the schema of a PostgreSQL database by its columns and what Alembic's table holds.

    Raises:
        JournalError: a newer oomguard wrote it, or another program.
    """
    if columns >= _OF_A_JOURNAL and str(version).isdecimal():
        return readable(int(version))
    tables = ", ".join(sorted({table for table, _column in columns}))
    raise NoJournalError(
        f"no oomguard journal: the schema oomguard holds another program's tables ({tables})",
        hint="name another database: --journal postgresql://USER@HOST/DATABASE",
    )
