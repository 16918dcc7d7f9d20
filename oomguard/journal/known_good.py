"""Find known-good settings: changes under which a command or model ran, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.core.incident import Patch
from oomguard.core.past_runs import STOP_STATUSES, KnownSettings
from oomguard.journal.codec import (
    numbers_of,
    parse_list,
    parse_object,
    patch_of,
    values_of,
    words_of,
)
from oomguard.journal.database import Database

# 1 for an attempt that worked, 0 for one that ran out of memory, otherwise NULL. An attempt worked
# if it ended well, or if its user stopped it after its engine had printed its memory figures. Any
# other failure, including a hang, counts as NULL.
_HELD: Final = f"""CASE
WHEN attempt.ended_at IS NULL THEN NULL
WHEN attempt.incident IS NOT NULL THEN 0
WHEN attempt.error <> '' THEN NULL
WHEN attempt.exit_status = 0 THEN 1
WHEN attempt.exit_status IN ({", ".join(map(str, STOP_STATUSES))}) AND attempt.measured <> '{{}}' THEN 1
END"""
# Only the last 20,000 attempts of runs that are not forgotten, so that a start does not wait for a
# journal of years. If a run does not record whether masking hid more than secrets, a mask inside a
# word may, and other commands would look the same.
_TRIED: Final = f"""
WITH tried AS (
  SELECT attempt.id, attempt.settings, run.original, run.folder, run.files,
    run.engine, run.engine_version, run.device,
    {_HELD} AS held, row_number() OVER (ORDER BY {{order}}) AS moment
  FROM attempt JOIN run ON run.session = attempt.session
  WHERE run.forgotten = 0 AND attempt.id > (SELECT max(id) FROM attempt) - 20000
    AND (run.hides_secrets_alone = 1
      OR (run.hides_secrets_alone IS NULL AND replace(run.original, '"***"', '') NOT LIKE '%***%'))
), alike AS (
  SELECT original, folder, files, settings, engine, engine_version, device,
    max(CASE WHEN held = 1 THEN moment END) AS last_held, sum(held) AS held, sum(1 - held) AS failed,
    max(CASE WHEN held = 0 THEN moment END) AS last_failed
  FROM tried WHERE held IS NOT NULL
  GROUP BY original, folder, files, settings, engine, engine_version, device
)
SELECT alike.original, alike.folder, alike.files, alike.settings,
  alike.engine, alike.engine_version, alike.device,
  alike.last_held, alike.held, alike.failed, alike.last_failed, tried.id
FROM alike LEFT JOIN tried ON tried.moment = alike.last_held"""  # noqa: S608
_LAST_RUN: Final = """
SELECT run.number, run.session, run.original, run.who, run.host,
  attempt.number, attempt.started_at, attempt.measured
FROM attempt JOIN run ON run.session = attempt.session WHERE attempt.id = :id"""
_PATCHES: Final = (
    "SELECT patches FROM attempt WHERE session = :session AND number <= :number ORDER BY number"
)
_SET_BY_USER: Final = """
SELECT attempt.set_by_user FROM attempt JOIN run ON run.session = attempt.session
WHERE run.original = :original AND attempt.set_by_user IS NOT NULL ORDER BY attempt.id"""
_BY_MODEL: Final = f"""
WITH tried AS (
  SELECT run.model, run.engine, run.engine_version, run.device, attempt.settings, run.who, run.host,
    {_HELD} AS held, attempt.started_at
  FROM attempt JOIN run ON run.session = attempt.session
  WHERE run.forgotten = 0 AND run.engine IS NOT NULL AND attempt.started_at >= :since
)
SELECT model, engine, engine_version, device, settings, who, host,
  sum(held), sum(1 - held), min(started_at), max(started_at)
FROM tried WHERE held IS NOT NULL
GROUP BY model, engine, engine_version, device, settings, who, host"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class KnownGood:
    """Hold changes under which a command ran.

    Attributes:
        original: the command before any patch, with secrets masked.
        folder: the working directory; None if unknown.
        files: the digest of the files that it names; None without files.
        engine: the engine that the output names; None if it names none.
        engine_version: the version that the engine printed; None if it printed none.
        device: name and size of the GPUs; None if unknown.
        settings: everything that was changed, by setting; empty if the command ran as given.
        held: how often it worked.
        failed: how often it ran out of memory.
        has_failed_since: whether it ran out of memory after it last worked.
        last_id: its last attempt that worked.
        last_held: the position of that attempt in the order of attempts.
        last_failed: the position of the last failed attempt; None if none failed.
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
    """Describe the last run that worked.

    Attributes:
        number: the number that the user types.
        began_at: when it began, in Unix seconds.
        patches: the last change of each setting.
        measured: facts and the values that it measured.
        set_by_user: whether the user had set each setting.
        who: who ran it; None if not recorded.
        host: on which machine; None if not recorded.
    """

    number: int
    began_at: float
    patches: Mapping[str, Patch]
    measured: Mapping[str, float]
    set_by_user: Mapping[str, bool | None]
    who: str | None = None
    host: str | None = None


def known_to_work(database: Database) -> list[KnownGood]:
    """Return known-good settings from the last 20,000 attempts, latest success first.

    A failure without a recorded engine, version or device counts for each that it may belong to.
    """
    return [known for known in tried_before(database) if known.held]


def tried_before(database: Database) -> list[KnownGood]:
    """Return ``known_to_work`` followed by settings that never worked."""
    groups = [
        _Group(tuple(row[:4]), tuple(row[4:7]), *row[7:])
        for row in database.query(_TRIED.replace("{order}", database.order))
    ]
    failures: dict[tuple[Any, ...], list[_Group]] = {}
    for group in groups:
        if group.last_failed is not None:
            failures.setdefault(group.started, []).append(group)
    known = [_known(group, failures.get(group.started, [])) for group in groups]
    return sorted(known, key=lambda one: one.last_held, reverse=True)


def last_run(database: Database, known: KnownGood) -> KnownRun:
    """Return the last run in which these settings worked.

    Each of its patches spans from the value before any change to the last value. It has the highest
    effect of all changes in between.
    """
    (row,) = database.query(_LAST_RUN, {"id": known.last_id})
    number, session, original, who, host, attempt, began_at, measured = row
    patches: dict[str, Patch] = {}
    for (text,) in database.query(_PATCHES, {"session": session, "number": attempt}):
        for patch in (patch_of(row) for row in parse_list(text) if isinstance(row, dict)):
            first = patches.get(patch.setting, patch)
            patches[patch.setting] = replace(
                patch, old=first.old, effect=max(first.effect, patch.effect)
            )
    chosen: dict[str, Any] = {}
    for (text,) in database.query(_SET_BY_USER, {"original": original}):
        chosen |= parse_object(text)
    return KnownRun(
        number, began_at, patches, numbers_of(parse_object(measured)), chosen, who, host
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Group attempts with the same command, folder, files, changes, engine and device."""

    started: tuple[Any, ...]
    ran_on: tuple[str | None, ...]
    last_held: int | None
    held: int
    failed: int
    last_failed: int | None
    last_id: int | None

    def may_be(self, other: _Group) -> bool:
        return all(
            a is None or b is None or a == b for a, b in zip(self.ran_on, other.ran_on, strict=True)
        )


def _known(group: _Group, failures: list[_Group]) -> KnownGood:
    original, folder, files, settings = group.started
    engine, version, device = group.ran_on
    same = [other for other in failures if group.may_be(other)]
    last_failed = max((other.last_failed or 0 for other in same), default=0)
    return KnownGood(
        words_of(original),
        folder,
        files,
        engine,
        version,
        device,
        values_of(parse_object(settings)),
        int(group.held),
        sum(int(other.failed) for other in same),
        has_failed_since=last_failed > (group.last_held or 0),
        last_id=group.last_id or 0,
        last_held=group.last_held or 0,
        last_failed=last_failed or None,
    )


def known_settings(
    database: Database, *, model: str | None = None, since: float | None = None
) -> list[KnownSettings]:
    """Return settings that worked or ran out of memory, by model, engine version and device.

    The latest measurement comes first.

    Args:
        database: a journal.
        model: only models whose name contains this text (case-insensitive); None for all.
        since: only measurements after this time, in Unix seconds; None for all.
    """
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for row in database.query(_BY_MODEL, {"since": 0.0 if since is None else since}):
        if model is None or model.casefold() in str(row[0] or "").casefold():
            groups.setdefault(row[:5], []).append(row[5:])
    found = (_entry(what, rows) for what, rows in groups.items())
    return sorted(found, key=lambda entry: entry.last_at, reverse=True)


def _entry(what: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> KnownSettings:
    model, engine, version, device, settings = what
    by: Counter[tuple[str | None, str | None]] = Counter()
    for who, host, held, failed, _first_at, _last_at in rows:
        by[who, host] += int(held + failed)
    return KnownSettings(
        model,
        engine,
        version,
        device,
        values_of(parse_object(settings)),
        sum(int(row[2]) for row in rows),
        sum(int(row[3]) for row in rows),
        measured_by=tuple((who, host, count) for (who, host), count in by.most_common()),
        first_at=min(row[4] for row in rows),
        last_at=max(row[5] for row in rows),
    )
