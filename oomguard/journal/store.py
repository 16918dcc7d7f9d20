"""The local journal: one record of every attempt, in an SQLite file in the user's state folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import InputError, JournalError
from oomguard.core.files import make_folder
from oomguard.journal.liveness import LivenessLock
from oomguard.journal.location import default_path
from oomguard.journal.record import Ended, Ran, Record
from oomguard.journal.sqlite import open_file, prepare
from oomguard.journal.write import write_begin, write_end

__all__ = ["Journal", "Ran", "Record", "default_path"]

_RECORDS: Final = """
SELECT session, number, started_at, ended_at, exit_status,
  command, settings, patches, predicted, measured, incident
FROM attempt WHERE :session IS NULL OR session = :session ORDER BY id"""


class Journal:
    """Writes attempts as they begin and end; several oomguards may write at once.

    Args:
        path: the file; it and its folder are created, readable by the user alone.
        busy_s: how long each use waits while others lock the file.

    Raises:
        InputError: the file cannot be written, or a newer oomguard wrote it.
    """

    def __init__(self, path: Path, *, busy_s: float = 10.0) -> None:
        self.path = path
        self._busy_s = busy_s
        self._first: Record | None = None
        self._lock: LivenessLock | None = None
        try:
            make_folder(path.parent, 0o700)
            path.touch(mode=0o600)  # commands are masked, and still private
            with open_file(path, busy_s) as database:
                prepare(database)
        except (JournalError, OSError) as error:
            hint = (
                getattr(error, "hint", None)
                or "--journal PATH chooses another place for the journal"
            )
            raise InputError(f"{path}: {error}", hint=hint) from None

    def begin(self, record: Record) -> Record:
        """Write an attempt that starts now, and return its record for ``end``.

        Raises JournalError if the file is locked, full or missing.
        """
        if not record.started_at:
            record = replace(record, started_at=time.time())
        record = record.after(self._first)
        if self._lock is None or self._lock.session != record.session:
            self._first = record
            self._lock = LivenessLock(record.session)
        with open_file(self.path, self._busy_s) as database, database.transaction():
            write_begin(database, record)
        return record

    def end(
        self,
        begun: Record,
        *,
        exit_status: int,
        incident: Mapping[str, Any] | None,
        measured: Mapping[str, Any],
        ran: Ran | None = None,
        set_by_user: Mapping[str, bool | None] | None = None,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        """Complete an attempt: ``begun`` is what ``begin`` returned, the rest is as in ``Ended``.

        Raises JournalError as ``begin`` does.
        """
        now = time.time()
        ended = Ended(exit_status, incident, measured, ran, set_by_user, seconds, error, now)
        with open_file(self.path, self._busy_s) as database, database.transaction():
            if not write_end(database, begun.session, begun.number, ended):
                write_begin(database, begun)  # it was removed while it ran
                write_end(database, begun.session, begun.number, ended)

    def finish(self, wait_s: float) -> None:
        """Release the run's liveness lock; there is nothing to wait for."""
        if self._lock is not None:
            self._lock.release()

    def records(self, session: str | None = None) -> list[Record]:
        """Return the records of one session, or of all (None), oldest first."""
        with open_file(self.path, self._busy_s, read_only=True) as database:
            return [_record(*row) for row in database.query(_RECORDS, {"session": session})]


def _record(
    session: str,
    number: int,
    started_at: float,
    ended_at: float | None,
    exit_status: int | None,
    *texts: str | None,
) -> Record:
    command, settings, patches, predicted, measured, incident = [
        json.loads(text or "null") for text in texts
    ]
    return Record(
        session,
        number,
        command,
        settings,
        patches,
        incident,
        predicted,
        measured,
        started_at,
        ended_at,
        exit_status,
    )
