"""Write the local journal: every attempt, in an SQLite file in the user's state folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import InputError, JournalError
from oomguard.core.files import make_folder
from oomguard.journal.codec import AttemptEnd, AttemptRow, RunIdentity
from oomguard.journal.database import Database, open_file, prepare
from oomguard.journal.location import default_path
from oomguard.report.json import json_line, plain_value

# "ON CONFLICT" alone would use up a run number for each later attempt. The casts give PostgreSQL
# the types of parameters that may be NULL.
_BEGIN_RUN: Final = """
INSERT INTO run (session, original, folder, files, hides_secrets_alone, who, host, clock_offset_s)
SELECT CAST(:session AS text), CAST(:original AS text), CAST(:folder AS text), CAST(:files AS text),
  CAST(:hides_secrets_alone AS integer), CAST(:who AS text), CAST(:host AS text),
  CAST(:clock_offset_s AS double precision)
WHERE NOT EXISTS (SELECT 1 FROM run WHERE session = CAST(:session AS text))
ON CONFLICT DO NOTHING"""
_BEGIN: Final = """
INSERT INTO attempt (session, number, started_at, command, settings, patches, predicted, measured)
VALUES (:session, :number, :started_at, :command, :settings, :patches, :predicted, '{}')
ON CONFLICT DO NOTHING"""
_END: Final = """
UPDATE attempt
SET ended_at = coalesce(started_at + :seconds, :ended_at), exit_status = :exit_status,
  incident = :incident, measured = :measured, set_by_user = :set_by_user, error = :error
WHERE session = :session AND number = :number"""
# Known values of a run stay if a later attempt lacks them.
_END_RUN: Final = """
UPDATE run
SET engine = coalesce(:engine, engine), engine_version = coalesce(:engine_version, engine_version),
  model = coalesce(:model, model), device = coalesce(:device, device)
WHERE session = :session"""


def write_begin(
    database: Database,
    record: AttemptRow,
    clock_offset_s: float | None = None,
    *,
    has_run: bool = False,
) -> None:
    """Write the begin of an attempt, and its run if that is missing; existing rows stay.

    Args:
        database: the database, in a transaction.
        record: the attempt.
        clock_offset_s: seconds from this machine's clock to the journal's; None for the same clock.
        has_run: whether its run is known to exist.
    """
    if not has_run:
        alone = record.hides_secrets_alone
        run = {
            "session": record.session,
            "original": json_line(list(record.original or record.command)),
            "folder": record.folder,
            "files": record.files,
            "hides_secrets_alone": None if alone is None else int(alone),
            "who": record.who,
            "host": record.host,
            "clock_offset_s": clock_offset_s,
        }
        database.execute(_BEGIN_RUN, run)
    attempt = {
        "session": record.session,
        "number": record.number,
        "started_at": record.started_at + (clock_offset_s or 0.0),
        "command": json_line(list(record.command)),
        "settings": json_line(plain_value(record.settings)),
        "patches": json_line(plain_value(record.patches)),
        "predicted": json_line(plain_value(record.predicted or {})),
    }
    database.execute(_BEGIN, attempt)


def write_end(
    database: Database, session: str, number: int, ended: AttemptEnd, clock_offset_s: float = 0.0
) -> bool:
    """Complete an attempt; return whether its row exists.

    Args:
        database: the database, in a transaction.
        session: the attempt's run.
        number: the attempt's number.
        ended: how it ended.
        clock_offset_s: as in ``write_begin``.
    """
    if ended.incident is None:
        incident = None
    else:
        incident = json_line(plain_value(ended.incident))
    if ended.set_by_user:
        chosen = json_line(plain_value(ended.set_by_user))
    else:
        chosen = None
    values = {
        "session": session,
        "number": number,
        "seconds": ended.seconds,  # counted from the written start
        "ended_at": ended.ended_at + clock_offset_s,
        "exit_status": ended.exit_status,
        "incident": incident,
        "measured": json_line(plain_value(ended.measured)),
        "set_by_user": chosen,
        "error": ended.error,
    }
    is_there = database.execute(_END, values) > 0
    if is_there and ended.ran is not None:
        ran = ended.ran
        known = {"engine": ran.engine, "engine_version": ran.engine_version}
        known |= {"model": ran.model, "device": ran.device}
        if any(value is not None for value in known.values()):
            database.execute(_END_RUN, {"session": session, **known})
    return is_there


__all__ = ["AttemptRow", "Journal", "RunIdentity", "default_path"]

_RECORDS: Final = """
SELECT session, number, started_at, ended_at, exit_status,
  command, settings, patches, predicted, measured, incident
FROM attempt WHERE :session IS NULL OR session = :session ORDER BY id"""


class Journal:
    """Write attempts as they begin and end; several oomguards may write at once.

    Args:
        path: the file; it and its folder are created, readable only by the user.
        busy_s: seconds that each use waits for a locked file.

    Raises:
        InputError: if the file cannot be written, or a newer oomguard wrote it.
    """

    def __init__(self, path: Path, *, busy_s: float = 10.0) -> None:
        self.path = path
        self._busy_s = busy_s
        self._first: AttemptRow | None = None
        self._lock: LivenessLock | None = None
        try:
            make_folder(path.parent, 0o700)
            # Commands are masked, but still private.
            path.touch(mode=0o600)
            with open_file(path, busy_s) as database:
                prepare(database)
        except (JournalError, OSError) as error:
            hint = getattr(error, "hint", None) or "choose another file with --journal PATH"
            raise InputError(f"{path}: {error}", hint=hint) from None

    def begin(self, record: AttemptRow) -> AttemptRow:
        """Write an attempt that starts now, and return its record for ``end``.

        Raises:
            JournalError: if the file is locked, full or missing.
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
        begun: AttemptRow,
        *,
        exit_status: int,
        incident: Mapping[str, Any] | None,
        measured: Mapping[str, Any],
        ran: RunIdentity | None = None,
        set_by_user: Mapping[str, bool | None] | None = None,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        """Complete an attempt: ``begun`` is the result of ``begin``, the rest as in ``AttemptEnd``.

        Raises:
            JournalError: as in ``begin``.
        """
        now = time.time()
        ended = AttemptEnd(exit_status, incident, measured, ran, set_by_user, seconds, error, now)
        with open_file(self.path, self._busy_s) as database, database.transaction():
            if not write_end(database, begun.session, begun.number, ended):
                # history --keep removed the run while it ran, so begin it again.
                write_begin(database, begun)
                write_end(database, begun.session, begun.number, ended)

    def finish(self, wait_s: float) -> None:
        """Release the run's liveness lock; there is nothing to wait for."""
        if self._lock is not None:
            self._lock.release()

    def records(self, session: str | None = None) -> list[AttemptRow]:
        """Return the records of one session, oldest first; None returns all sessions."""
        with open_file(self.path, self._busy_s, read_only=True) as database:
            return [_record(*row) for row in database.query(_RECORDS, {"session": session})]


def _record(
    session: str,
    number: int,
    started_at: float,
    ended_at: float | None,
    exit_status: int | None,
    *texts: str | None,
) -> AttemptRow:
    parsed = (json.loads(text or "null") for text in texts)
    command, settings, patches, predicted, measured, incident = parsed
    return AttemptRow(
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


# A run is alive as long as it binds this name, which the kernel frees at its death. The socket has
# no file, so any user of the machine can test it, and nothing has to be cleaned up. Names belong to
# a network namespace: a container with the host's name and its own network counts as dead.
# The leading NUL makes it an abstract name of Linux (unix(7)). Other systems have none, so nothing
# is known there.
_SOCKET_NAME: Final = "\0oomguard-run-"


class LivenessLock:
    """Mark a run as alive until ``release`` or the death of this process.

    Args:
        session: the run's name in the journal.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        bound = _bound(session)
        # Without abstract sockets, no other process can know whether the run is alive.
        if bound is None:
            self._close = None
        else:
            self._close = weakref.finalize(self, os.close, bound.detach())

    def release(self) -> None:
        """Mark the run as ended."""
        if self._close is not None:
            self._close()


def is_alive(session: str, host: str | None) -> bool | None:
    """Return whether the run that began on ``host`` is alive; None if this machine cannot know."""
    if host is None or host != platform.node():
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.bind(_SOCKET_NAME + session)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return True
        return None
    return False


def _bound(session: str) -> socket.socket | None:
    with contextlib.suppress(OSError, ValueError):
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.bind(_SOCKET_NAME + session)
        except BaseException:
            bound.close()
            raise
        return bound
    return None
