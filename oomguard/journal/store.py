"""The journal: one record of every attempt, in SQLite in the user's state folder. Keeping it never changes an attempt."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, select

from oomguard.errors import InputError, JournalError
from oomguard.journal.database import plainly, sqlite_engine
from oomguard.journal.place import default_path
from oomguard.journal.record import Ended, Ran, Record
from oomguard.journal.schema import SCHEMA_VERSION, prepare, version_of
from oomguard.journal.tables import ATTEMPT
from oomguard.journal.writing import write_begin, write_end, write_forgotten
from oomguard.user_files import make_folder

__all__ = ["SCHEMA_VERSION", "Journal", "Ran", "Record", "default_path"]
_COLUMNS: Final = (
    *("session", "number", "command", "settings", "patches", "predicted", "measured"),
    *("incident", "started_at", "ended_at", "exit_status"),
)


class Journal:
    """Begins a record when an attempt starts and ends it when it is over; several oomguards may write at once.

    Args:
        path: the database; it and its folder are created, readable by the user alone.
        busy_s: how long each use waits for others that hold the file locked.

    Raises:
        InputError: the file cannot be written, or a newer oomguard wrote it.
    """

    def __init__(self, path: Path, *, busy_s: float = 10.0) -> None:
        self.path, self._busy_s = path, busy_s
        try:
            make_folder(path.parent, 0o700)
            path.touch(mode=0o600)  # commands are masked, and still nobody else's business
            with plainly():
                if self._version() != SCHEMA_VERSION:
                    with self._open() as database:
                        prepare(database)
        except (JournalError, OSError) as error:
            raise InputError(f"{path}: {error}", hint="--journal PATH chooses another place for the journal") from None

    def _version(self) -> int:
        """Return its schema, and lock nobody out for it."""
        with sqlite_engine(self.path, self._busy_s, reads_only=True).connect() as database:
            return version_of(database)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Connection]:
        with plainly(), sqlite_engine(self.path, self._busy_s).begin() as database:
            yield database

    def begin(self, record: Record) -> int:
        """Write the record of an attempt that starts now, and return its row's number for ``end``.

        Raises JournalError if the database is locked, full or gone.
        """
        record = record if record.started_at else replace(record, started_at=time.time())
        with self._open() as database:
            return write_begin(database, record) or 0

    def end(
        self,
        row: int,
        *,
        exit_status: int,
        incident: Mapping[str, Any] | None,
        measured: Mapping[str, Any],
        ran: Ran | None = None,
        set_by_user: Mapping[str, bool | None] | None = None,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        """Complete a record: ``row`` is what ``begin`` returned, all else is as ``Ended`` has it.

        Raises JournalError as ``begin`` does.
        """
        ended = Ended(exit_status, incident, measured, ran, set_by_user, seconds, error, time.time())
        with self._open() as database:
            write_end(database, ended, row=row)

    def finish(self, wait_s: float) -> None:
        """Do nothing: what was written is there."""

    def forget(self, numbers: Sequence[int]) -> None:
        """Have ``--reuse`` leave these runs alone; what they were stays written.

        Raises JournalError as ``begin`` does.
        """
        with self._open() as database:
            write_forgotten(database, numbers)

    def records(self, session: str | None = None) -> list[Record]:
        """Return the records of one session, or of all (None), oldest first."""
        asked = select(*(ATTEMPT.c[name] for name in _COLUMNS)).order_by(ATTEMPT.c.id)
        if session is not None:
            asked = asked.where(ATTEMPT.c.session == session)
        with plainly(), sqlite_engine(self.path, self._busy_s, reads_only=True).connect() as database:
            return [_record(*row) for row in database.execute(asked)]


def _record(session: str, number: int, *values: Any) -> Record:
    *texts, incident, started_at, ended_at, exit_status = values
    command, settings, patches, predicted, measured = [json.loads(text or "null") for text in texts]
    told = {"predicted": predicted, "measured": measured, "exit_status": exit_status}
    return Record(
        session, number, command, settings, patches, incident, **told, started_at=started_at, ended_at=ended_at
    )
