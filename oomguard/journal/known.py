"""What is known to work: for each command, engine version and device, the changes under which it ran, and how often they held."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.facts import FactValue
from oomguard.incident import Patch
from oomguard.journal.contract import listed, mapped, numbers_of, patch_of, values_of
from oomguard.journal.runs import words_of
from oomguard.past_runs import STOP_STATUSES

# A start does not wait for all of a journal of years.
_MOST_ATTEMPTS: Final = 20_000
# An attempt held where it ended well, and where its user stopped it after its engine had told what it got. One that failed of
# something that is no memory failure, a hang too, says nothing.
_HELD: Final = """
CASE WHEN a.ended_at IS NULL THEN NULL WHEN a.incident IS NOT NULL THEN 0 WHEN a.error <> '' THEN NULL WHEN a.exit_status = 0 THEN 1
WHEN a.exit_status IN ({stops}) AND a.measured <> '{}' THEN 1 END""".replace(
    "{stops}", ", ".join(map(str, STOP_STATUSES))
)
# Of a run that does not say so a mask within a word may stand for more than a secret: then other commands look like it.
_KNOWN: Final = """
SELECT original, folder, files, engine, engine_version, device, settings, max(CASE WHEN held THEN id END) AS last, sum(held), sum(NOT held),
  max(CASE WHEN NOT held THEN id END)
FROM (SELECT a.id, a.settings, r.*, {held} AS held FROM attempt a JOIN run r ON r.session = a.session WHERE r.forgotten = 0
  AND coalesce(r.hides_secrets_alone, instr(replace(r.original, '"***"', ''), '***') = 0)
  AND a.id > (SELECT max(id) FROM attempt) - ?)
WHERE held IS NOT NULL
GROUP BY original, folder, files, engine, engine_version, device, settings ORDER BY last DESC""".replace(
    "{held}", _HELD
)
_OF_RUN: Final = """
SELECT r.number, a.session, a.number, a.started_at, a.measured FROM attempt a JOIN run r ON r.session = a.session WHERE a.id = ?"""
_CHANGED: Final = "SELECT patches FROM attempt WHERE session = ? AND number <= ? ORDER BY number"
_CHOSEN: Final = """
SELECT a.set_by_user FROM attempt a JOIN run r ON r.session = a.session
WHERE r.original = ? AND a.set_by_user IS NOT NULL ORDER BY a.id"""


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


@dataclass(frozen=True, slots=True)
class KnownRun:
    """The last run that held: its number, when it began, what changed each setting last, what it measured, and whose each was."""

    number: int
    began_at: float
    patches: Mapping[str, Patch]
    measured: Mapping[str, float]
    set_by_user: Mapping[str, bool | None]


def known_to_work(database: sqlite3.Connection) -> list[Known]:
    """Return all that is known to work by the last 20,000 attempts and not forgotten, what held last first.

    A failure whose engine, version or device was not recorded counts for each that it may have been.
    """
    rows = database.execute(_KNOWN, (_MOST_ATTEMPTS,)).fetchall()
    alike: dict[tuple[Any, ...], list[_Group]] = {}
    groups = [_Group(row[:3] + row[6:7], row[3:6], *row[7:]) for row in rows]
    for group in groups:
        if group.last_failed is not None:
            alike.setdefault(group.started, []).append(group)
    return [_known(group, alike.get(group.started, [])) for group in groups if group.last is not None]


def last_run(database: sqlite3.Connection, known: Known) -> KnownRun:
    """Return the last run in which it held.

    A patch of it goes from what the setting was before any change to what it was in the end, at the highest cost on the way.
    """
    number, session, attempt, began_at, measured = database.execute(_OF_RUN, (known.last_id,)).fetchone()
    patches: dict[str, Patch] = {}
    for (text,) in database.execute(_CHANGED, (session, attempt)):
        for patch in (patch_of(row) for row in listed(text) if isinstance(row, dict)):
            before = patches.get(patch.setting)
            patches[patch.setting] = patch if before is None else _joined(before, patch)
    chosen: dict[str, Any] = {}
    (original,) = database.execute("SELECT original FROM run WHERE number = ?", (number,)).fetchone()
    for (text,) in database.execute(_CHOSEN, (original,)):
        chosen |= mapped(text)
    return KnownRun(number, began_at, patches, numbers_of(mapped(measured)), chosen)


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


def _known(group: _Group, failures: list[_Group]) -> Known:
    original, folder, files, settings = group.started
    engine, version, device = group.ran_on
    same = [other for other in failures if group.may_be(other)]
    last = group.last or 0
    since = any(other.last_failed is not None and other.last_failed > last for other in same)
    failed = sum(other.failed for other in same)
    changed = values_of(mapped(settings))
    return Known(words_of(original), folder, files, engine, version, device, changed, group.held, failed, since, last)
