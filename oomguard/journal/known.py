"""What is known to work: for each command, engine version and device, the changes under which it ran, and how often they held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Subquery, and_, case, func, or_, select

from oomguard.facts import FactValue
from oomguard.incident import Patch
from oomguard.journal.contract import listed, mapped, numbers_of, patch_of, values_of
from oomguard.journal.database import is_sqlite
from oomguard.journal.runs import words_of
from oomguard.journal.tables import ATTEMPT, RUN
from oomguard.past_runs import STOP_STATUSES

# A start does not wait for all of a journal of years.
_MOST_ATTEMPTS: Final = 20_000
_ALIKE: Final = ("original", "folder", "files", "engine", "engine_version", "device")


def held() -> ColumnElement[int | None]:
    """Return 1 for an attempt that held, 0 for one that memory failed, else NULL.

    It held where it ended well, and where its user stopped it after its engine had told what it got. One that failed of something
    that is no memory failure, a hang too, says nothing.
    """
    return case(
        (ATTEMPT.c.ended_at.is_(None), None),
        (ATTEMPT.c.incident.is_not(None), 0),
        (ATTEMPT.c.error != "", None),
        (ATTEMPT.c.exit_status == 0, 1),
        (and_(ATTEMPT.c.exit_status.in_(STOP_STATUSES), ATTEMPT.c.measured != "{}"), 1),
    )


@dataclass(frozen=True, slots=True)
class Known:
    """Changes under which a command ran.

    Attributes:
        original: the command before any patch, secrets masked.
        folder: where it was started.
        files: the digest of the files that it names.
        engine: the engine that spoke.
        engine_version: as it printed it.
        device: name and size of the GPUs.
        settings: all that was changed, by setting; empty: it ran as given.
        held: how often it ran so.
        failed: how often it failed so, of memory.
        has_failed_since: whether it failed so after it held last.
        last_id: its last attempt that held.
        last_held: the place of that one in the order of attempts.
        last_failed: the place of the last that failed; None: none did.
    """

    original: tuple[str, ...]
    folder: str | None
    files: str | None
    engine: str | None
    engine_version: str | None
    device: str | None
    settings: Mapping[str, FactValue]
    held: int
    failed: int
    has_failed_since: bool
    last_id: int
    last_held: int = 0
    last_failed: int | None = None


@dataclass(frozen=True, slots=True)
class KnownRun:
    """The last run that held: its number, when it began, what changed each setting last, what it measured, whose each was, and who ran
    it on which host (None: not recorded).
    """

    number: int
    began_at: float
    patches: Mapping[str, Patch]
    measured: Mapping[str, float]
    set_by_user: Mapping[str, bool | None]
    who: str | None = None
    host: str | None = None


def known_to_work(database: Connection) -> list[Known]:
    """Return all that is known to work by the last 20,000 attempts and not forgotten, what held last first.

    A failure whose engine, version or device was not recorded counts for each that it may have been.
    """
    return [known for known in tried_before(database) if known.held]


def tried_before(database: Connection) -> list[Known]:
    """Return what ``known_to_work`` does, and behind it what never held."""
    tried = _tried(database)
    alike = [tried.c[name] for name in (*_ALIKE, "settings")]
    has_held, has_failed = tried.c.held == 1, tried.c.held == 0
    groups = (
        select(
            *alike,
            func.max(case((has_held, tried.c.moment))).label("last"),
            func.sum(tried.c.held),
            func.sum(1 - tried.c.held),
            func.max(case((has_failed, tried.c.moment))),
        )
        .where(tried.c.held.is_not(None))
        .group_by(*alike)
    )
    found = database.execute(groups).all()
    ids = _ids(database, tried, [row.last for row in found if row.last is not None])
    failures: dict[tuple[Any, ...], list[_Group]] = {}
    rows = [_Group((*row[:3], row[6]), tuple(row[3:6]), *row[7:]) for row in found]
    for group in rows:
        if group.last_failed is not None:
            failures.setdefault(group.started, []).append(group)
    known = [_known(group, failures.get(group.started, []), ids.get(group.last or 0, 0)) for group in rows]
    return sorted(known, key=lambda one: one.last_held, reverse=True)


def _tried(database: Connection) -> Subquery:
    """Return the last attempts of runs that are not forgotten, each with the moment by which they are in order.

    In a file that is the order in which they began. Into a shared journal they come late, from hosts with other clocks: there it is
    the time at which they began by the database's clock.
    """
    of_server = func.row_number().over(order_by=(ATTEMPT.c.started_at, ATTEMPT.c.id))
    moment = (ATTEMPT.c.id if is_sqlite(database) else of_server).label("moment")
    newest = select(func.max(ATTEMPT.c.id)).scalar_subquery() - _MOST_ATTEMPTS
    # Of a run that does not say so a mask within a word may stand for more than a secret: then other commands look like it.
    is_exact = func.replace(RUN.c.original, '"***"', "").not_like("%***%")
    return (
        select(ATTEMPT.c.id, ATTEMPT.c.settings, *(RUN.c[name] for name in _ALIKE), held().label("held"), moment)
        .join(RUN, RUN.c.session == ATTEMPT.c.session)
        .where(RUN.c.forgotten == 0, ATTEMPT.c.id > newest)
        .where(or_(RUN.c.hides_secrets_alone == 1, and_(RUN.c.hides_secrets_alone.is_(None), is_exact)))
        .subquery()
    )


def _ids(database: Connection, tried: Subquery, moments: list[int]) -> dict[int, int]:
    """Return the attempts of these moments."""
    if is_sqlite(database):
        return {moment: moment for moment in moments}
    found = database.execute(select(tried.c.moment, tried.c.id).where(tried.c.moment.in_(moments)))
    return {int(moment): int(row) for moment, row in found}


def last_run(database: Connection, known: Known) -> KnownRun:
    """Return the last run in which it held.

    A patch of it goes from what the setting was before any change to what it was in the end, at the highest cost on the way.
    """
    of_run = (
        RUN.c.number,
        RUN.c.session,
        ATTEMPT.c.number,
        ATTEMPT.c.started_at,
        ATTEMPT.c.measured,
        RUN.c.who,
        RUN.c.host,
    )
    joined = select(*of_run, RUN.c.original).join(RUN, RUN.c.session == ATTEMPT.c.session)
    row = database.execute(joined.where(ATTEMPT.c.id == known.last_id)).one()
    number, session, attempt, began_at, measured, who, host, original = row
    patches: dict[str, Patch] = {}
    changed = select(ATTEMPT.c.patches).where(ATTEMPT.c.session == session, ATTEMPT.c.number <= attempt)
    for text in database.execute(changed.order_by(ATTEMPT.c.number)).scalars():
        for patch in (patch_of(row) for row in listed(text) if isinstance(row, dict)):
            before = patches.get(patch.setting)
            patches[patch.setting] = patch if before is None else _joined(before, patch)
    chosen: dict[str, Any] = {}
    told = select(ATTEMPT.c.set_by_user).join(RUN, RUN.c.session == ATTEMPT.c.session).order_by(ATTEMPT.c.id)
    for text in database.execute(told.where(RUN.c.original == original, ATTEMPT.c.set_by_user.is_not(None))).scalars():
        chosen |= mapped(text)
    return KnownRun(number, began_at, patches, numbers_of(mapped(measured)), chosen, who, host)


def _joined(first: Patch, then: Patch) -> Patch:
    return replace(then, old=first.old, effect=max(first.effect, then.effect))


@dataclass(frozen=True, slots=True)
class _Group:
    """Attempts started alike (command, folder, files, changes) on the same engine, version and device: how often they held and failed."""

    started: tuple[Any, ...]
    ran_on: tuple[str | None, ...]
    last: int | None
    held: int
    failed: int
    last_failed: int | None

    def may_be(self, other: _Group) -> bool:
        return all(a is None or b is None or a == b for a, b in zip(self.ran_on, other.ran_on, strict=True))


def _known(group: _Group, failures: list[_Group], last_id: int) -> Known:
    original, folder, files, settings = group.started
    engine, version, device = group.ran_on
    same = [other for other in failures if group.may_be(other)]
    last, last_failed = group.last or 0, max((other.last_failed or 0 for other in same), default=0)
    counts = group.held, sum(other.failed for other in same), last_failed > last
    of_it = (words_of(original), folder, files, engine, version, device, values_of(mapped(settings)))
    return Known(*of_it, *counts, last_id, last, last_failed or None)
