"""Where a journal is: a file of this machine, or a database that a team shares."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from oomguard.errors import UsageError
from oomguard.user_files import state_file

_SCHEME: Final = re.compile(r"(?i)([a-z][a-z0-9+.-]*)://")
# As libpq names them, and as SQLAlchemy does with its driver.
_SCHEMES: Final = frozenset({"postgresql", "postgres", "postgresql+psycopg"})
_NOT_IN_A_NAME: Final = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, slots=True)
class Shared:
    """A journal in a PostgreSQL database, by its URL; shown without the password."""

    url: str

    def __str__(self) -> str:
        from oomguard.report.mask import mask  # a start waits for it only where it is shown

        return mask(self.url)

    def __repr__(self) -> str:
        return f"Shared({str(self)!r})"

    @property
    def name(self) -> str:
        """Return a name for files about it: the same for every user and password of the database."""
        parts = urlsplit(self.url)
        there = (parts.hostname or "", str(parts.port or ""), parts.path.strip("/"), _host_of_query(parts.query))
        digest = hashlib.sha256("\0".join(there).encode()).hexdigest()[:12]
        words = _NOT_IN_A_NAME.sub("-", "-".join(filter(None, (there[0], there[2]))))[:40]
        return f"{words or 'postgresql'}-{digest}"


Place = Path | Shared


def place_of(text: str) -> Place:
    """Return the place that ``--journal`` names.

    Raises:
        UsageError: a URL of another database than PostgreSQL.
    """
    found = _SCHEME.match(text)
    if found is None:
        return Path(text)
    if found[1].lower() not in _SCHEMES:
        raise UsageError(
            f"--journal {Shared(text)}: no journal can be kept in {found[1]}",
            hint="name a file (SQLite), or a PostgreSQL database: --journal postgresql://USER@HOST/DATABASE",
        )
    return Shared(f"postgresql://{text[found.end() :]}")


def default_path() -> Path:
    """Return the journal's place in the user's state folder (``XDG_STATE_HOME`` respected)."""
    return state_file("journal.sqlite3")


def _host_of_query(query: str) -> str:
    """Return the host, or the folder of the socket, that the query of a URL names."""
    return "&".join(sorted(part for part in query.split("&") if part.startswith(("host=", "port=", "dbname="))))
