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
_HOST: Final = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::(?P<port>\d*))?")
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
    def hosts(self) -> tuple[tuple[str, str], ...]:
        """Return host and port of each server that may answer, as libpq's URLs name several: ``h1:5432,h2``; "" where it is left out.

        Raises:
            ValueError: they cannot be read.
        """
        named = urlsplit(self.url).netloc.rpartition("@")[2].split(",")
        return tuple(_host_and_port(one) for one in named)

    @property
    def libpq_url(self) -> str:
        """Return the URL, without the hosts where they are several: SQLAlchemy reads one."""
        if len(self.hosts) < 2:
            return self.url
        netloc = urlsplit(self.url).netloc
        user, at, _hosts = netloc.rpartition("@")
        return self.url.replace(netloc, user + at, 1)

    @property
    def name(self) -> str:
        """Return a name for files about it: the same for every user and password of the database."""
        parts, hosts = urlsplit(self.url), self.hosts
        names, ports = (",".join(each) for each in zip(*hosts, strict=True))
        there = (names.lower(), ports, parts.path.strip("/"), _host_of_query(parts.query))
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
    shared = Shared(f"postgresql://{text[found.end() :]}")
    try:
        shared.hosts  # noqa: B018 - a URL that cannot be read would fail with the first write, and nothing would be kept
    except ValueError:  # it is not shown: nobody knows what of it is the password
        raise UsageError(
            "--journal postgresql://…: its host and port cannot be read",
            hint="--journal postgresql://USER@HOST:PORT/DATABASE; write / @ : in a password as %2F %40 %3A",
        ) from None
    return shared


def default_path() -> Path:
    """Return the journal's place in the user's state folder (``XDG_STATE_HOME`` respected)."""
    return state_file("journal.sqlite3")


def _host_and_port(text: str) -> tuple[str, str]:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return found["name"] or found["address"] or "", found["port"] or ""


def _host_of_query(query: str) -> str:
    """Return the host, or the folder of the socket, that the query of a URL names."""
    return "&".join(sorted(part for part in query.split("&") if part.startswith(("host=", "port=", "dbname="))))
