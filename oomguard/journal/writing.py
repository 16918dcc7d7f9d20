"""Writing an attempt into the tables, as it begins and as it ends.

A shared database is written through these statements. A file is written through what they compile to, which stands ready in
sqlite.toml: a run does not load SQLAlchemy for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    Connection,
    Executable,
    bindparam,
    exists,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql

from oomguard.journal.columns import as_new, of_begin, of_end, of_ran, of_run
from oomguard.journal.record import Ended, Record
from oomguard.journal.tables import ATTEMPT, RUN

_RUN: Final = ("session", "original", "folder", "files", "hides_secrets_alone", "who", "host", "clock_offset_s")
_BEGIN: Final = ("session", "number", "started_at", "command", "settings", "patches", "predicted", "measured")
_END: Final = ("exit_status", "incident", "measured", "set_by_user", "error")
_RAN: Final = ("engine", "engine_version", "model", "device")
_RECORD: Final = (
    *("session", "number", "command", "settings", "patches", "predicted", "measured"),
    *("incident", "started_at", "ended_at", "exit_status"),
)


def _new(table: Any, names: Iterable[str]) -> dict[str, BindParameter[Any]]:
    """Return a parameter for each column; SQLAlchemy keeps the columns' own names for itself."""
    return {name: bindparam(f"new_{name}", type_=table.c[name].type) for name in names}


def _run_that_is_not_there() -> tuple[list[str], Any]:
    """Return columns and rows of a run's insert: one that is ignored would use up a number."""
    new = _new(RUN, _RUN)
    return list(_RUN), select(*new.values()).where(~exists(select(RUN.c.number).where(RUN.c.session == new["session"])))


def _end_of(which: Any) -> Executable:
    lasted = ATTEMPT.c.started_at + bindparam("new_seconds", type_=ATTEMPT.c.ended_at.type)
    ended_at = func.coalesce(lasted, bindparam("new_ended_at", type_=ATTEMPT.c.ended_at.type))
    return update(ATTEMPT).where(which).values(ended_at=ended_at, **_new(ATTEMPT, _END))


def _ran_of(which: Any) -> Executable:
    """Return the update of a run with what ran; what is known of it stays where a later attempt does not tell."""
    own = select(ATTEMPT.c.session).where(which).scalar_subquery()
    told = {name: func.coalesce(value, RUN.c[name]) for name, value in _new(RUN, _RAN).items()}
    return update(RUN).where(RUN.c.session == own).values(told)


_SESSION: Final = bindparam("of_session", type_=ATTEMPT.c.session.type)
# A file gives the number of a row that was removed to the next one.
_ROW: Final = (ATTEMPT.c.id == bindparam("row", type_=ATTEMPT.c.id.type)) & (
    _SESSION.is_(None) | (ATTEMPT.c.session == _SESSION)
)
_OF: Final = (ATTEMPT.c.session == bindparam("of_session")) & (ATTEMPT.c.number == bindparam("of_number"))
_FORGET: Final = (
    update(RUN).where(RUN.c.number == bindparam("run", type_=RUN.c.number.type)).values(forgotten=literal_column("1"))
)

# Those of a file, by the names that sqlite.toml has.
OF_A_FILE: Final[Mapping[str, Executable]] = {
    "insert_run": insert(RUN).from_select(*_run_that_is_not_there()),
    "insert_attempt": insert(ATTEMPT).values(_new(ATTEMPT, _BEGIN)),
    "end_attempt": _end_of(_ROW),
    "tell_run": _ran_of(_ROW),
    "forget_run": _FORGET,
    "select_records": select(*(ATTEMPT.c[name] for name in _RECORD))
    .where(_SESSION.is_(None) | (ATTEMPT.c.session == _SESSION))
    .order_by(ATTEMPT.c.id),
}
_INSERT_RUN: Final = postgresql.insert(RUN).from_select(*_run_that_is_not_there()).on_conflict_do_nothing()
_INSERT_ATTEMPT: Final = postgresql.insert(ATTEMPT).values(_new(ATTEMPT, _BEGIN)).on_conflict_do_nothing()
_END_ATTEMPT: Final = _end_of(_OF)
_TELL_RUN: Final = _ran_of(_OF)


def write_begin(connection: Connection, record: Record, clock_offset_s: float, *, has_run: bool = False) -> None:
    """Write an attempt that begins into a shared database, and its run where it has none; one that is there stays as it is.

    Args:
        connection: within a transaction.
        record: the attempt.
        clock_offset_s: what its host's clock lacks of the database's, by which times are kept.
        has_run: whether its run is known to be there.
    """
    if not has_run:
        connection.execute(_INSERT_RUN, as_new(of_run(record, clock_offset_s)))
    connection.execute(_INSERT_ATTEMPT, as_new(of_begin(record, clock_offset_s)))


def write_end(connection: Connection, ended: Ended, of: tuple[str, int], clock_offset_s: float) -> bool:
    """Complete an attempt in a shared database; return whether it is there.

    Args:
        connection: within a transaction.
        ended: how it ended.
        of: its session and number.
        clock_offset_s: as ``write_begin`` has it.
    """
    which = {"of_session": of[0], "of_number": of[1]}
    is_there = connection.execute(_END_ATTEMPT, as_new(of_end(ended, clock_offset_s)) | which).rowcount > 0
    if told := {} if ended.ran is None else of_ran(ended.ran):
        connection.execute(_TELL_RUN, as_new(told) | which)
    return is_there


def write_forgotten(connection: Connection, numbers: Sequence[int]) -> None:
    """Have ``--reuse`` leave these runs alone, in a file or in a shared database."""
    for number in numbers:
        connection.execute(_FORGET, {"run": number})
