"""What of a record goes into which column: of a file's tables and of a shared database's alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomguard.journal.record import Ended, Ran, Record
from oomguard.report.json import json_line, plain_value


def of_run(record: Record, clock_offset_s: float | None = None) -> dict[str, Any]:
    """Return a run as its first attempt tells it; ``clock_offset_s`` as the table has it."""
    alone = record.hides_secrets_alone
    return {
        "session": record.session,
        "original": json_line(list(record.original or record.command)),
        "folder": record.folder,
        "files": record.files,
        "hides_secrets_alone": None if alone is None else int(alone),
        "who": record.who,
        "host": record.host,
        "clock_offset_s": clock_offset_s,
    }


def of_begin(record: Record, clock_offset_s: float | None = None) -> dict[str, Any]:
    """Return an attempt that begins."""
    return {
        "session": record.session,
        "number": record.number,
        "started_at": record.started_at + (clock_offset_s or 0.0),
        "command": json_line(list(record.command)),
        "settings": json_line(plain_value(record.settings)),
        "patches": json_line(plain_value(record.patches)),
        "predicted": json_line(plain_value(record.predicted or {})),
        "measured": "{}",
    }


def of_end(ended: Ended, clock_offset_s: float = 0.0) -> dict[str, Any]:
    """Return how an attempt ended; ``seconds``, where known, are counted from the start that is written."""
    return {
        "seconds": ended.seconds,
        "ended_at": ended.ended_at + clock_offset_s,
        "exit_status": ended.exit_status,
        "incident": plain_value(ended.incident),
        "measured": json_line(plain_value(ended.measured)),
        "set_by_user": json_line(plain_value(ended.set_by_user)) if ended.set_by_user else None,
        "error": ended.error,
    }


def of_ran(ran: Ran) -> dict[str, str | None]:
    """Return what ran; empty where nothing is known of it."""
    told = {"engine": ran.engine, "engine_version": ran.engine_version, "model": ran.model, "device": ran.device}
    return told if any(value is not None for value in told.values()) else {}


def as_new(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names that their parameters have in a statement."""
    return {f"new_{name}": value for name, value in values.items()}
