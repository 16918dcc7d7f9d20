"""Write an attempt when it begins and ends; the same statements for SQLite and PostgreSQL."""

from __future__ import annotations

from typing import Final

from oomguard.journal.database import Database
from oomguard.journal.record import Ended, Record
from oomguard.report.json import json_line, plain_value

# Not "ON CONFLICT" alone: each attempt after the first would use up a run number. The casts tell
# PostgreSQL the types of parameters that may be NULL.
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
# What is known of a run stays if a later attempt does not say it.
_END_RUN: Final = """
UPDATE run
SET engine = coalesce(:engine, engine), engine_version = coalesce(:engine_version, engine_version),
  model = coalesce(:model, model), device = coalesce(:device, device)
WHERE session = :session"""


def write_begin(
    database: Database,
    record: Record,
    clock_offset_s: float | None = None,
    *,
    has_run: bool = False,
) -> None:
    """Write an attempt that begins, and its run if that is missing; what is there stays as it is.

    Args:
        database: in a transaction.
        record: the attempt.
        clock_offset_s: seconds from this machine's clock to the journal's; None: the same clock.
        has_run: whether its run is known to be there.
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
    database: Database, session: str, number: int, ended: Ended, clock_offset_s: float = 0.0
) -> bool:
    """Complete an attempt; return whether it is there.

    Args:
        database: in a transaction.
        session: the attempt's run.
        number: the attempt's number.
        ended: how it ended.
        clock_offset_s: as for ``write_begin``.
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
