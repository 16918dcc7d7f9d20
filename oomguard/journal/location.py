"""Locate a journal: a file on this machine, or a PostgreSQL database that a team shares."""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from oomguard.core.errors import UsageError
from oomguard.core.files import state_file

_SCHEME: Final = re.compile(r"(?i)([a-z][a-z0-9+.-]*)://")
_SCHEMES: Final = frozenset({"postgresql", "postgres", "postgresql+psycopg"})
_HOST: Final = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::(?P<port>\d*))?")
_NOT_IN_A_NAME: Final = re.compile(r"[^\w.-]+")

_OUTBOX: Final = "undelivered"
_OUTBOX_FILES: Final = frozenset({".jsonl", ".delivered"})
_SQLITE_FILES: Final = ("-journal", "-wal", "-shm")
# True for the attempts of every schema so far, but not for another program's table of that name.
_IS_JOURNAL: Final = (
    "SELECT count(*) = 4 FROM pragma_table_info('attempt')"
    " WHERE name IN ('session', 'patches', 'incident', 'predicted')"
)


@dataclass(frozen=True, slots=True)
class JournalUrl:
    """Hold the URL of a journal in PostgreSQL; ``str`` shows it without the password."""

    url: str

    def __str__(self) -> str:
        from oomguard.core.redact import mask

        return mask(self.url)

    def __repr__(self) -> str:
        return f"JournalUrl({str(self)!r})"

    @property
    def hosts(self) -> tuple[tuple[str, str], ...]:
        """Host and port of each server (libpq accepts several: ``h1:5432,h2``), "" if left out.

        Raises:
            ValueError: if they cannot be read.
        """
        named = urlsplit(self.url).netloc.rpartition("@")[2].split(",")
        return tuple(_host_and_port(one) for one in named)

    @property
    def outbox(self) -> Path:
        """The folder for records that wait for the database.

        It is the same for every user and password.
        """
        parts = urlsplit(self.url)
        hosts = self.hosts
        names, ports = (",".join(each) for each in zip(*hosts, strict=True))
        there = (names.lower(), ports, parts.path.strip("/"), _host_of_query(parts.query))
        digest = hashlib.sha256("\0".join(there).encode()).hexdigest()[:12]
        words = _NOT_IN_A_NAME.sub("-", "-".join(filter(None, (there[0], there[2]))))[:40]
        return state_file(_OUTBOX) / f"{words or 'postgresql'}-{digest}"


Location = Path | JournalUrl


def parse_location(text: str) -> Location:
    """Return the location that ``--journal`` names.

    Raises:
        UsageError: if it is a URL of another database than PostgreSQL.
    """
    found = _SCHEME.match(text)
    if found is None:
        return Path(text)
    if found[1].lower() not in _SCHEMES:
        raise UsageError(
            f"--journal {JournalUrl(text)}: oomguard cannot keep a journal in {found[1]}",
            hint=(
                "name a file (SQLite), or a PostgreSQL database: --journal "
                "postgresql://USER@HOST/DATABASE"
            ),
        )
    location = JournalUrl(f"postgresql://{text[found.end() :]}")
    try:
        location.hosts  # noqa: B018 - fails now instead of at the first write
    except ValueError:
        # The message does not show the text, because any part of it may be the password.
        raise UsageError(
            "--journal postgresql://…: oomguard cannot read its host and port",
            hint=(
                "for example: --journal postgresql://USER@HOST:PORT/DATABASE; write / @ : in a "
                "password as %2F %40 %3A"
            ),
        ) from None
    return location


def default_path() -> Path:
    """Return the journal's file in the user's state folder (``XDG_STATE_HOME`` is respected)."""
    return state_file("journal.sqlite3")


def is_journal_file(path: str) -> bool:
    """Return whether a file belongs to any run's journal.

    It may be the database, one of SQLite's files next to it, or an outbox. An unreadable file is
    not one. Nothing is locked.
    """
    if _is_outbox_file(Path(path)):
        return True
    for end in _SQLITE_FILES:
        if path.endswith(end) and _is_journal(path.removesuffix(end)):
            return True
    return _is_journal(path)


def _is_outbox_file(path: Path) -> bool:
    above = [folder.name for folder in path.parents[1:3]]
    return path.suffix in _OUTBOX_FILES and above == [_OUTBOX, state_file(_OUTBOX).parent.name]


def _is_journal(path: str) -> bool:
    import sqlite3

    with contextlib.suppress(sqlite3.Error, OSError, ValueError):
        # Immutable: SQLite then neither locks the file nor rolls back a half-finished write of
        # another program.
        uri = f"{Path(path).as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            return bool(database.execute(_IS_JOURNAL).fetchone()[0])
    return False


def _host_and_port(text: str) -> tuple[str, str]:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return found["name"] or found["address"] or "", found["port"] or ""


def _host_of_query(query: str) -> str:
    """Return the host, or the folder of the socket, in the query of a URL."""
    parts = []
    for part in sorted(query.split("&")):
        if part.startswith(("host=", "port=", "dbname=")):
            parts.append(part)
    return "&".join(parts)
