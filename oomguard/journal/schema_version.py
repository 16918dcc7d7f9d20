"""The schema that this version writes and reads; a newer one is left alone, and so is another program's database."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from oomguard.errors import JournalError

SCHEMA_VERSION: Final = 5
UPGRADE: Final = "pip install --upgrade oomguard"


def readable(version: int) -> int:
    """Return a database's schema.

    Raises:
        JournalError: a newer oomguard wrote it.
    """
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"written by a newer oomguard (schema {version}, this one reads {SCHEMA_VERSION})", hint=UPGRADE
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
        raise JournalError("a database of another program, no journal")
    return version
