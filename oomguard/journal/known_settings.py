"""Under which settings each model ran, for all who write a journal: how often that held, and who measured it where."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from sqlalchemy import Connection, func, select

from oomguard.journal.contract import mapped, values_of
from oomguard.journal.known import held
from oomguard.journal.tables import ATTEMPT, RUN
from oomguard.past_runs import KnownSettings

_WHAT: Final = (RUN.c.model, RUN.c.engine, RUN.c.engine_version, RUN.c.device, ATTEMPT.c.settings)


def known_settings(
    database: Connection, *, model: str | None = None, since: float | None = None
) -> list[KnownSettings]:
    """Return what held or failed for memory, by model, engine version, device and settings; the last measured first.

    Args:
        database: a journal.
        model: only of models whose name holds this text, in any case.
        since: only what was measured after this moment, in Unix seconds.
    """
    tried = (
        select(*_WHAT, RUN.c.who, RUN.c.host, held().label("held"), ATTEMPT.c.started_at)
        .join(RUN, RUN.c.session == ATTEMPT.c.session)
        .where(RUN.c.forgotten == 0, RUN.c.engine.is_not(None))
    )
    if since is not None:
        tried = tried.where(ATTEMPT.c.started_at >= since)
    one = tried.subquery()
    alike = [one.c[column.name] for column in (*_WHAT, RUN.c.who, RUN.c.host)]
    counts = func.sum(one.c.held), func.sum(1 - one.c.held), func.min(one.c.started_at), func.max(one.c.started_at)
    rows = database.execute(select(*alike, *counts).where(one.c.held.is_not(None)).group_by(*alike))
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in map(tuple, rows):
        if model is None or model.casefold() in str(row[0] or "").casefold():
            groups.setdefault(row[:5], []).append(row[5:])
    return sorted((_entry(what, own) for what, own in groups.items()), key=lambda entry: entry.last_at, reverse=True)


def _entry(what: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> KnownSettings:
    model, engine, version, device, settings = what
    by: Counter[tuple[str | None, str | None]] = Counter()
    times_held = times_failed = 0
    for who, host, held_here, failed_here, _first_at, _last_at in rows:
        by[who, host] += held_here + failed_here
        times_held, times_failed = times_held + held_here, times_failed + failed_here
    return KnownSettings(
        *(model, engine, version, device, values_of(mapped(settings)), times_held, times_failed),
        measured_by=tuple((who, host, count) for (who, host), count in by.most_common()),
        first_at=min(row[4] for row in rows),
        last_at=max(row[5] for row in rows),
    )
