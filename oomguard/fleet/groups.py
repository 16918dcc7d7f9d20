"""What failed over many inputs: incidents grouped by cause, model, setting and version, and the patch that would have fixed most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.facts import FactValue
from oomguard.fleet.finding import Change, Finding
from oomguard.fleet.retold import told_once
from oomguard.records import Record

_MOST_WRITERS: Final = 3


@dataclass(frozen=True, slots=True, repr=False)
class Fix(Record):
    """The changes that would have fixed ``fixes`` incidents of a group: of each setting the value that holds for all of these."""

    changes: tuple[Change, ...]
    fixes: int


@dataclass(frozen=True, slots=True, repr=False)
class Group(Record):
    """Incidents of one cause, model, setting and version.

    ``setting`` is the one that the plan changes first, None where no value could be solved. ``first_at`` and ``last_at`` are Unix
    seconds by the clocks of those who printed them, None where nothing tells. ``refused`` are setting and reason of what the user does
    not permit, with how many incidents it would have fixed. ``writers`` are those with most incidents, each with how many.
    ``told_again`` are the places, as input and line, of logs that only repeat an incident of the group.
    """

    cause: str
    title: str
    kinds: tuple[str, ...]
    model: str | None
    setting: str | None
    framework: str
    version: str | None
    incidents: int
    inputs: int
    first_at: float | None
    last_at: float | None
    fix: Fix | None
    refused: tuple[tuple[str, str, int], ...]
    writers: tuple[tuple[str, int], ...]
    other_writers: int
    example: Finding
    told_again: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class FleetSummary(Record):
    """What was read and what failed in it: groups, the one with most incidents first.

    ``inputs`` were read, ``failed`` of them hold an out-of-memory, ``unread`` could not be read, ``left_out`` were last written
    before the time asked for.
    """

    inputs: int
    failed: int
    unread: int
    left_out: int
    groups: tuple[Group, ...]
    since: float | None = None

    @property
    def incidents(self) -> int:
        """How many incidents there are in all groups."""
        return sum(group.incidents for group in self.groups)

    @property
    def best(self) -> Group | None:
        """The group whose fix would have fixed most incidents; None where no group has one."""
        fixable = [group for group in self.groups if group.fix is not None]
        return max(fixable, key=lambda group: group.fix.fixes if group.fix else 0, default=None)


def summed(
    findings: Iterable[Finding],
    *,
    inputs: int,
    failed: int,
    unread: int = 0,
    left_out: int = 0,
    since: float | None = None,
) -> FleetSummary:
    """Return the summary of findings; ``since`` (Unix seconds) leaves out those that are known to be older."""
    found = [one for one in findings if since is None or one.at is None or one.at >= since]
    kept = told_once(found)
    together: dict[tuple[str, ...], list[Finding]] = {}
    for one in kept:
        setting = one.changes[0].setting if one.changes else ""
        key = (one.cause, one.model or "", setting, one.framework, one.version or "")
        together.setdefault(key, []).append(one)
    groups = sorted((_group(same) for same in together.values()), key=_order)
    if since is not None:
        failed = len({one.source for one in found if one.is_oom})
    return FleetSummary(inputs, failed, unread, left_out, tuple(groups), since)


def _order(group: Group) -> tuple[object, ...]:
    return (-group.incidents, group.cause, group.model or "", group.setting or "", group.framework, group.version or "")


def _group(same: Sequence[Finding]) -> Group:
    first = same[0]
    times = [one.at for one in same if one.at is not None]
    writers = Counter(words for one in same if (words := one.writer.words))
    refused = Counter(one.refused for one in same if one.refused is not None)
    ordered = sorted(writers.items(), key=lambda item: (-item[1], item[0]))
    return Group(
        first.cause,
        first.title,
        tuple(kind for kind, _count in Counter(one.kind for one in same).most_common()),
        first.model,
        first.changes[0].setting if first.changes else None,
        first.framework,
        first.version,
        len(same),
        len({source for one in same for source in _sources(one)}),
        min(times, default=None),
        max(times, default=None),
        _fix([one for one in same if one.refused is None]),
        tuple((*what, count) for what, count in refused.most_common()),
        tuple(ordered[:_MOST_WRITERS]),
        max(0, len(ordered) - _MOST_WRITERS),
        min(same, key=lambda one: (one.at is None, one.at or 0.0, one.source, one.line or 0)),
        tuple(place for one in same for place in one.told_again),
    )


def _sources(one: Finding) -> tuple[str, ...]:
    return one.source, *(source for source, _line in one.told_again)


def _fix(same: Sequence[Finding]) -> Fix | None:
    """Return the patch that fixes most: of the settings that most plans begin with, each at the value that suffices for all of them."""
    plans = Counter(tuple(change.setting for change in one.changes) for one in same if one.changes)
    if not plans:
        return None
    settings = min(plans, key=lambda names: (-plans[names], names))
    theirs = [one.changes for one in same if tuple(change.setting for change in one.changes) == settings]
    chosen, held = [], theirs
    for i in range(len(settings)):
        change = _enough([changes[i] for changes in held])
        chosen.append(change)
        held = [changes for changes in held if _suffices(change, changes[i])]
    return Fix(tuple(chosen), len(held))


def _enough(changes: Sequence[Change]) -> Change:
    """Return the change that goes furthest among those in the direction of most; of values without an order the most frequent."""
    directions = Counter(_direction(change) for change in changes)
    direction = max(directions, key=lambda way: (directions[way], way))
    going = [change for change in changes if _direction(change) == direction]
    if direction:
        return max(going, key=lambda change: direction * _number(change.new))
    values = Counter(repr(change.new) for change in going)
    most = max(values, key=lambda value: (values[value], value))
    return next(change for change in going if repr(change.new) == most)


def _suffices(chosen: Change, needed: Change) -> bool:
    direction = _direction(chosen)
    if not direction or _direction(needed) != direction:
        return chosen.new == needed.new
    return direction * _number(chosen.new) >= direction * _number(needed.new)


def _direction(change: Change) -> int:
    """Return 1 for a value that is raised, -1 for one that is lowered, 0 for one without an order."""
    numbers = [
        value for value in (change.old, change.new) if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    if not numbers or not isinstance(change.new, (int, float)) or isinstance(change.new, bool):
        return 0
    return -1 if len(numbers) < 2 or change.new < numbers[0] else 1


def _number(value: FactValue) -> float:
    assert isinstance(value, (int, float))  # noqa: S101 - a direction is one of numbers
    return float(value)
