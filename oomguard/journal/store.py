"""The journal: one record of every attempt, in SQLite in the user's state folder. Keeping it never changes an attempt."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oomguard.errors import InputError, JournalError
from oomguard.journal.columns import as_new, of_begin, of_end, of_ran, of_run
from oomguard.journal.going import Going
from oomguard.journal.place import default_path
from oomguard.journal.record import Ended, Ran, Record
from oomguard.journal.schema_version import SCHEMA_VERSION
from oomguard.journal.sqlite_file import prepare_file, reads, statements, writes
from oomguard.report.json import json_line
from oomguard.user_files import make_folder

__all__ = ["SCHEMA_VERSION", "Journal", "Ran", "Record", "default_path"]


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
        self._begun: dict[int, Record] = {}
        self._first: Record | None = None
        self._going: Going | None = None
        try:
            make_folder(path.parent, 0o700)
            path.touch(mode=0o600)  # commands are masked, and still nobody else's business
            prepare_file(path, busy_s)
        except (JournalError, OSError) as error:
            raise InputError(f"{path}: {error}", hint="--journal PATH chooses another place for the journal") from None

    def begin(self, record: Record) -> int:
        """Write the record of an attempt that starts now, and return its row's number for ``end``.

        Raises JournalError if the database is locked, full or gone.
        """
        record = record if record.started_at else replace(record, started_at=time.time())
        record = record.after(self._first)
        if self._going is None or self._going.session != record.session:
            self._first, self._going = record, Going(record.session)
        with writes(self.path, self._busy_s) as database:
            row = _insert(database, record)
        self._begun[row] = record
        return row

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
        values = of_end(ended)
        values["incident"] = None if ended.incident is None else json_line(values["incident"])
        record = self._begun.pop(row, None)
        with writes(self.path, self._busy_s) as database:
            of_it = {"row": row, "of_session": None if record is None else record.session}
            is_there = database.execute(statements()["end_attempt"], {**as_new(values), **of_it}).rowcount
            if not is_there and record is not None:  # it was removed while it ran; another may have its number by now
                of_it["row"] = _insert(database, record)
                database.execute(statements()["end_attempt"], {**as_new(values), **of_it})
            if told := {} if ran is None else of_ran(ran):
                database.execute(statements()["tell_run"], {**as_new(told), **of_it})

    def finish(self, wait_s: float) -> None:
        """Say that the run goes on no more; what was written is there."""
        if self._going is not None:
            self._going.end()

    def forget(self, numbers: Sequence[int]) -> None:
        """Have ``--reuse`` leave these runs alone; what they were stays written.

        Raises JournalError as ``begin`` does.
        """
        with writes(self.path, self._busy_s) as database:
            database.executemany(statements()["forget_run"], [{"run": number} for number in numbers])

    def records(self, session: str | None = None) -> list[Record]:
        """Return the records of one session, or of all (None), oldest first."""
        with reads(self.path, self._busy_s) as database:
            return [_record(*row) for row in database.execute(statements()["select_records"], {"of_session": session})]


def _insert(database: sqlite3.Connection, record: Record) -> int:
    """Write an attempt that began, and its run where it has none; return its row's number."""
    database.execute(statements()["insert_run"], as_new(of_run(record)))
    return database.execute(statements()["insert_attempt"], as_new(of_begin(record))).lastrowid or 0


def _record(session: str, number: int, *values: Any) -> Record:
    *texts, started_at, ended_at, exit_status = values
    command, settings, patches, predicted, measured, incident = [json.loads(text or "null") for text in texts]
    told = {"predicted": predicted, "measured": measured, "exit_status": exit_status}
    return Record(
        session, number, command, settings, patches, incident, **told, started_at=started_at, ended_at=ended_at
    )
