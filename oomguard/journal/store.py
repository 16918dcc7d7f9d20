"""The journal: one record of every attempt, in SQLite in the user's state folder. Keeping it never changes an attempt."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.errors import InputError
from oomguard.journal.schema import SCHEMA_VERSION, prepare
from oomguard.report.json import json_line, plain_value
from oomguard.user_files import make_folder, state_file

__all__ = ["SCHEMA_VERSION", "Journal", "Ran", "Record", "default_path"]
_SELECT: Final = """
SELECT session, number, command, settings, patches, incident, predicted, measured, started_at, ended_at, exit_status
FROM attempt WHERE ?1 IS NULL OR session = ?1 ORDER BY id"""


@dataclass(frozen=True, slots=True)
class Record:
    """One attempt as the journal keeps it; times are Unix seconds, and the caller has masked every text.

    ``original`` is the command before any patch (empty: ``command``), ``folder`` where it was started, ``files`` the digest of the
    files that it names, ``hides_secrets_alone`` whether masking hid nothing else of it (None: not known): of the first attempt of a
    session they are kept for all of it.
    """

    session: str
    number: int
    command: Sequence[str]
    settings: Mapping[str, Any]
    patches: Sequence[Mapping[str, Any]]
    incident: Mapping[str, Any] | None = None
    predicted: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    started_at: float = 0.0
    ended_at: float | None = None
    exit_status: int | None = None
    original: Sequence[str] = ()
    folder: str | None = None
    files: str | None = None
    hides_secrets_alone: bool | None = None


@dataclass(frozen=True, slots=True)
class Ran:
    """What an attempt turned out to run, masked: the engine that spoke, its version, its model, the GPUs; None: not known."""

    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    device: str | None = None


def default_path() -> Path:
    """Return the journal's place in the user's state folder (``XDG_STATE_HOME`` respected)."""
    return state_file("journal.sqlite3")


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
            with self._open() as database:
                prepare(database)
        except (sqlite3.Error, OSError) as error:
            raise InputError(f"{path}: {error}", hint="--journal PATH chooses another place for the journal") from None

    @contextlib.contextmanager
    def _open(self) -> Any:
        database = sqlite3.connect(self.path, timeout=self._busy_s)
        try:
            with database:
                yield database
        finally:
            database.close()

    def begin(self, record: Record) -> int:
        """Write the record of an attempt that starts now, and return its row's number for ``end``.

        Raises sqlite3.Error if the database is locked, full or gone.
        """
        with self._open() as database:
            original = json_line(list(record.original or record.command))
            database.execute(
                "INSERT INTO run (session, original, folder, files, hides_secrets_alone) SELECT ?1, ?2, ?3, ?4, ?5"
                " WHERE NOT EXISTS (SELECT 1 FROM run WHERE session = ?1)",  # one that is ignored would use up a number
                (record.session, original, record.folder, record.files, record.hides_secrets_alone),
            )
            row = database.execute(
                "INSERT INTO attempt (session, number, started_at, command, settings, patches, predicted, measured)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, '{}')",
                (
                    record.session,
                    record.number,
                    record.started_at or time.time(),
                    json_line(list(record.command)),
                    json_line(plain_value(record.settings)),
                    json_line(plain_value(record.patches)),
                    json_line(plain_value(record.predicted or {})),
                ),
            )
            return int(row.lastrowid or 0)

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
        """Complete a record.

        Args:
            row: what ``begin`` returned.
            exit_status: how the attempt ended, as a shell tells it.
            incident: the contract's object of the failure, None if none was found.
            measured: facts and what this attempt showed of them.
            ran: what ran; what is known of it stays where a later attempt does not tell.
            set_by_user: of the settings that may be changed after it, whether the user had set them.
            seconds: how long it ran; None: until now.
            error: why it failed, masked, where status and incident tell less.

        Raises:
            sqlite3.Error: as ``begin`` does.
        """
        with self._open() as database:
            database.execute(
                "UPDATE attempt SET ended_at = coalesce(started_at + ?, ?),"
                " exit_status = ?, incident = ?, measured = ?, set_by_user = ?, error = ? WHERE id = ?",
                (
                    seconds,
                    time.time(),
                    exit_status,
                    None if incident is None else json_line(plain_value(incident)),
                    json_line(plain_value(measured)),
                    json_line(plain_value(set_by_user)) if set_by_user else None,
                    error,
                    row,
                ),
            )
            if ran is not None and any(astuple(ran)):
                database.execute(
                    "UPDATE run SET engine = coalesce(?, engine), engine_version = coalesce(?, engine_version),"
                    " model = coalesce(?, model), device = coalesce(?, device)"
                    " WHERE session = (SELECT session FROM attempt WHERE id = ?)",
                    (*astuple(ran), row),
                )

    def forget(self, numbers: Sequence[int]) -> None:
        """Have ``--reuse`` leave these runs alone; what they were stays written.

        Raises sqlite3.Error as ``begin`` does.
        """
        with self._open() as database:
            database.executemany("UPDATE run SET forgotten = 1 WHERE number = ?", [(number,) for number in numbers])

    def records(self, session: str | None = None) -> list[Record]:
        """Return the records of one session, or of all (None), oldest first."""
        with self._open() as database:
            rows = database.execute(_SELECT, (session,)).fetchall()
        return [_record(row) for row in rows]


def _record(row: tuple[Any, ...]) -> Record:
    session, number, *texts, started_at, ended_at, exit_status = row
    command, settings, patches, incident, predicted, measured = [json.loads(text or "null") for text in texts]
    return Record(
        session, number, command, settings, patches, incident, predicted, measured, started_at, ended_at, exit_status
    )
