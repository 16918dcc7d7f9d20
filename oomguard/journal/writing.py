"""Writing an attempt into the tables, as it begins and as it ends: in a file's and in a shared database's alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import Connection, Insert, exists, func, insert, literal, select, update
from sqlalchemy.dialects import postgresql

from oomguard.journal.database import is_sqlite
from oomguard.journal.record import Ended, Record
from oomguard.journal.tables import ATTEMPT, RUN
from oomguard.report.json import json_line, plain_value

_OF_RUN: Final = ("session", "original", "folder", "files", "hides_secrets_alone", "who", "host", "clock_offset_s")


def write_begin(
    connection: Connection, record: Record, clock_offset_s: float | None = None, *, has_run: bool = False
) -> int | None:
    """Write an attempt that begins, and its run where it has none yet; one that is there already stays as it is.

    Args:
        connection: within a transaction.
        record: the attempt.
        clock_offset_s: what its host's clock lacks of the database's, by which times are kept; None: it is the same clock.
        has_run: whether its run is known to be there.

    Returns:
        The row's number; None where the attempt was there.
    """
    if not has_run:
        connection.execute(_insert(connection, RUN, _run(record, clock_offset_s)))
    values = {
        "session": record.session,
        "number": record.number,
        "started_at": record.started_at + (clock_offset_s or 0.0),
        "command": json_line(list(record.command)),
        "settings": json_line(plain_value(record.settings)),
        "patches": json_line(plain_value(record.patches)),
        "predicted": json_line(plain_value(record.predicted or {})),
        "measured": "{}",
    }
    if is_sqlite(connection):
        made = connection.execute(insert(ATTEMPT).values(values)).inserted_primary_key
        return None if made is None else int(made[0])
    row = connection.execute(
        postgresql.insert(ATTEMPT).values(values).on_conflict_do_nothing().returning(ATTEMPT.c.id)
    ).scalar()
    return None if row is None else int(row)


def write_end(
    connection: Connection,
    ended: Ended,
    *,
    row: int | None = None,
    of: tuple[str, int] = ("", 0),
    offset_s: float = 0.0,
) -> None:
    """Complete an attempt.

    Args:
        connection: within a transaction.
        ended: how it ended.
        row: its row, where that is known; else
        of: its session and number.
        offset_s: as ``clock_offset_s`` of ``write_begin``.
    """
    session, number = of
    which = ATTEMPT.c.id == row if row is not None else (ATTEMPT.c.session == session) & (ATTEMPT.c.number == number)
    seconds = ended.seconds
    changed: dict[str, Any] = {
        "ended_at": ended.ended_at + offset_s if seconds is None else ATTEMPT.c.started_at + seconds,
        "exit_status": ended.exit_status,
        "incident": plain_value(ended.incident),
        "measured": json_line(plain_value(ended.measured)),
        "set_by_user": json_line(plain_value(ended.set_by_user)) if ended.set_by_user else None,
        "error": ended.error,
    }
    connection.execute(update(ATTEMPT).where(which).values(changed))
    if ended.ran is None:
        return
    told = {name: func.coalesce(value, RUN.c[name]) for name, value in asdict(ended.ran).items() if value is not None}
    if told:
        own = select(ATTEMPT.c.session).where(which).scalar_subquery()
        connection.execute(update(RUN).where(RUN.c.session == own).values(told))


def write_forgotten(connection: Connection, numbers: Sequence[int]) -> None:
    """Have ``--reuse`` leave these runs alone."""
    for number in numbers:
        connection.execute(update(RUN).where(RUN.c.number == number).values(forgotten=1))


def _run(record: Record, clock_offset_s: float | None) -> dict[str, Any]:
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


def _insert(connection: Connection, table: Any, values: dict[str, Any]) -> Insert:
    """Return the insert of a run that is not there: one that is ignored would use up a number."""
    is_there = exists(select(table.c.number).where(table.c.session == values["session"]))
    columns = [literal(value, table.c[name].type) for name, value in values.items()]
    made = select(*columns).where(~is_there)
    if is_sqlite(connection):
        return insert(table).from_select(list(values), made)
    return postgresql.insert(table).from_select(list(values), made).on_conflict_do_nothing()
