"""Define the interface of an open journal database, SQLite or PostgreSQL.

Queries are plain SQL for both, with ``:name`` parameters. The differences are in ``sqlite.py``,
``postgres.py`` and the folders of ``migrations/``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from oomguard.core.errors import JournalError

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
