"""Group incidents of many inputs, and find the patch that would have fixed most of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from oomguard.cluster.fleet.findings import IncidentSummary, SettingChange
from oomguard.core.facts import FactValue
from oomguard.core.records import Record

# Several logs may show the same failure. A process has an output and an error log. In a Ray
# session, the worker, its driver and Ray's own processes have logs. A driver repeats its workers'
# output behind ``(NAME pid=N)``, and prints the error of a task again. raylet and GCS log why an
# actor died. An error log may show that an engine died, while the output log has the cause. Such a
# failure counts once, for the log closest to it; the other logs are listed as repetitions.

# If no worker's own log has a failure, the program's log is best, then those of Ray's processes.
_NEAREST: Final = (
    "job-driver-",
    "replica_",
    "python-core-worker",
    "python-core-driver",
    "raylet",
    "gcs_server",
)
_KILL: Final = ("host_oom", "ray")
_DEAD: Final = "engine_dead"
# The cause of a crash whose exception is in the log.
_EXPLAINED: Final = "not_memory"
# Ray's and SLURM's NAME.out and NAME.err, and torchrun's stdout.log and stderr.log, maybe
# compressed.
_STREAM: Final = re.compile(r"(?:\.(?:out|err)|(?:(?<=/)|^)std(?:out|err)(?:\.log)?)(?:\.gz)?$")
_PID: Final = re.compile(r"\bpid=(\d+)")
# A log may cut a message or append a hint.
_MESSAGE_CHARS: Final = 160


def merge_repeated(findings: Iterable[IncidentSummary]) -> list[IncidentSummary]:
    """Return the findings without repetitions of the same failure, in the same order.

    Each remaining finding lists the places of its repetitions.
    """
    same: dict[tuple[str, str], list[IncidentSummary]] = {}
    order = list(findings)
    for one in order:
        if one.message:
            same.setdefault((one.kind, " ".join(one.message.split())[:_MESSAGE_CHARS]), []).append(
                one
            )
    again: dict[int, IncidentSummary] = {}  # point to the original, not to another repetition
    for together in same.values():
        if len(together) > 1 and any(one.writer.session for one in together):
            again |= _repeats(together)
    for merge in (_killed, _dead):
        again |= merge([one for one in order if id(one) not in again])
    places: dict[int, list[tuple[str, int | None]]] = {}
    for one in order:
        if (first := again.get(id(one))) is not None:
            places.setdefault(id(first), []).append((one.source, one.line))
    return [
        replace(one, told_again=tuple(places[id(one)])) if id(one) in places else one
        for one in order
        if id(one) not in again
    ]


def _repeats(together: Sequence[IncidentSummary]) -> dict[int, IncidentSummary]:
    """Return which findings with the same message repeat which."""
    again: dict[int, IncidentSummary] = {}
    by_pid: dict[str | None, IncidentSummary] = {
        one.writer.pid: one for one in together if one.writer.pid is not None
    }
    sessions = dict.fromkeys(one.writer.session for one in together if one.writer.session)
    for session in sessions:
        of_it = [one for one in together if one.writer.session == session]
        own = [one for one in of_it if one.writer.pid is not None]
        others = [one for one in of_it if one.writer.pid is None]
        if own:
            nearest = own[0]
        else:
            nearest = min(others, key=_distance)
        for one in others:
            pid = _pid(one)
            if one is not nearest and (not own or pid is None or pid in by_pid):
                again[id(one)] = by_pid.get(pid, nearest)
    for one in together:  # a driver's output in another folder names its workers
        if one.writer.session is None and (first := by_pid.get(_pid(one))) is not None:
            again[id(one)] = first
    return again


def _killed(findings: Sequence[IncidentSummary]) -> dict[int, IncidentSummary]:
    """Return the kills in a raylet's log that another log shows with the killed process."""
    kills = [one for one in findings if one.writer.session and (one.kind, one.framework) == _KILL]
    hit = {one.writer.session: one for one in reversed(kills) if not _is_raylet(one)}
    return {
        id(one): hit[one.writer.session]
        for one in kills
        if _is_raylet(one) and one.writer.session in hit
    }


def _is_raylet(one: IncidentSummary) -> bool:
    return one.writer.process == "raylet"


def _dead(findings: Sequence[IncidentSummary]) -> dict[int, IncidentSummary]:
    """Return the engine crashes without a cause that another log explains."""
    dead = [one for one in findings if one.kind == _DEAD and one.cause != _EXPLAINED]
    if dead:
        causes = [one for one in findings if one.is_oom or one.cause == _EXPLAINED]
    else:
        causes = []
    by_output = {_both(one.source): one for one in reversed(causes)}
    workers: dict[tuple[str | None, str | None], IncidentSummary] = {
        (one.writer.session, one.writer.pid): one for one in reversed(causes) if one.writer.session
    }
    sessions: dict[str | None, IncidentSummary] = {
        one.writer.session: one for one in reversed(causes) if one.writer.session
    }
    again: dict[int, IncidentSummary] = {}
    for one in dead:
        pid = one.writer.pid or _pid(one)
        cause = by_output.get(_both(one.source)) or workers.get((one.writer.session, pid))
        if cause is None and one.writer.pid is None:
            cause = sessions.get(one.writer.session)
        if cause is not None and cause.source != one.source:
            again[id(one)] = cause
    return again


def _both(source: str) -> str:
    """Return the common part of the names of a process's output and error logs."""
    return _STREAM.sub("", source)


def _pid(one: IncidentSummary) -> str | None:
    found = _PID.search(one.process or "")
    return found and found[1]


def _distance(one: IncidentSummary) -> int:
    name = (one.writer.process or "").rpartition("/")[2]
    return next((i for i, begins in enumerate(_NEAREST) if name.startswith(begins)), len(_NEAREST))


_MOST_WRITERS: Final = 3


@dataclass(frozen=True, slots=True, repr=False)
class GroupFix(Record):
    """Hold the changes that would have fixed ``fixes`` incidents of a group.

    Each setting has a value that is sufficient for all of these incidents.
    """

    changes: tuple[SettingChange, ...]
    fixes: int


@dataclass(frozen=True, slots=True, repr=False)
class IncidentGroup(Record):
    """Group incidents of the same cause, model, setting and version.

    Attributes:
        setting: the first setting of the plan, or None if no value was solved.
        first_at: the time of the first incident in Unix seconds, or None if unknown.
        last_at: the time of the last incident in Unix seconds, or None if unknown.
        refused: the setting and reason of a change that the user does not permit, with the number
            of incidents that it would have fixed.
        writers: the processes with most incidents, with their numbers of incidents.
        told_again: the input and line of each repetition in another log.
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
    fix: GroupFix | None
    refused: tuple[tuple[str, str, int], ...]
    writers: tuple[tuple[str, int], ...]
    other_writers: int
    example: IncidentSummary
    told_again: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class FleetSummary(Record):
    """Summarize many inputs; the group with most incidents comes first.

    Attributes:
        inputs: the number of inputs that were read.
        failed: the number of inputs with an out-of-memory.
        unread: the number of inputs that could not be read.
        left_out: the number of inputs older than ``--since``.
    """

    inputs: int
    failed: int
    unread: int
    left_out: int
    groups: tuple[IncidentGroup, ...]
    since: float | None = None

    @property
    def incidents(self) -> int:
        """The number of incidents in all groups."""
        return sum(group.incidents for group in self.groups)

    @property
    def best(self) -> IncidentGroup | None:
        """The group whose fix would have fixed most incidents, or None without any fix."""
        fixable = [group for group in self.groups if group.fix is not None]
        return max(fixable, key=lambda group: group.fix.fixes if group.fix else 0, default=None)


def summarize_findings(
    findings: Iterable[IncidentSummary],
    *,
    inputs: int,
    failed: int,
    unread: int = 0,
    left_out: int = 0,
    since: float | None = None,
) -> FleetSummary:
    """Return the summary of findings; leave out those that are older than ``since``.

    ``since`` is in Unix seconds. None: keep all.
    """
    found = [one for one in findings if since is None or one.at is None or one.at >= since]
    kept = merge_repeated(found)
    together: dict[tuple[str, ...], list[IncidentSummary]] = {}
    for one in kept:
        if one.changes:
            setting = one.changes[0].setting
        else:
            setting = ""
        key = (one.cause, one.model or "", setting, one.framework, one.version or "")
        together.setdefault(key, []).append(one)
    groups = sorted((_group(same) for same in together.values()), key=_order)
    if since is not None:
        failed = len({one.source for one in found if one.is_oom})
    return FleetSummary(inputs, failed, unread, left_out, tuple(groups), since)


def _order(group: IncidentGroup) -> tuple[object, ...]:
    return (
        -group.incidents,
        group.cause,
        group.model or "",
        group.setting or "",
        group.framework,
        group.version or "",
    )


def _group(same: Sequence[IncidentSummary]) -> IncidentGroup:
    first = same[0]
    sources: set[str] = set()
    repetitions: list[tuple[str, int | None]] = []
    for one in same:
        sources.update(_sources(one))
        repetitions += one.told_again
    times = [one.at for one in same if one.at is not None]
    writers = Counter(words for one in same if (words := one.writer.words))
    refused = Counter(one.refused for one in same if one.refused is not None)
    ordered = sorted(writers.items(), key=lambda item: (-item[1], item[0]))
    return IncidentGroup(
        first.cause,
        first.title,
        tuple(kind for kind, _count in Counter(one.kind for one in same).most_common()),
        first.model,
        first.changes[0].setting if first.changes else None,
        first.framework,
        first.version,
        len(same),
        len(sources),
        min(times, default=None),
        max(times, default=None),
        _fix([one for one in same if one.refused is None]),
        tuple((*what, count) for what, count in refused.most_common()),
        tuple(ordered[:_MOST_WRITERS]),
        max(0, len(ordered) - _MOST_WRITERS),
        min(same, key=lambda one: (one.at is None, one.at or 0.0, one.source, one.line or 0)),
        tuple(repetitions),
    )


def _sources(one: IncidentSummary) -> tuple[str, ...]:
    return one.source, *(source for source, _line in one.told_again)


def _fix(same: Sequence[IncidentSummary]) -> GroupFix | None:
    """Return the patch that fixes most incidents.

    It changes the settings that most plans change first, each to a value that is sufficient for all
    of them.
    """
    plans = Counter(tuple(change.setting for change in one.changes) for one in same if one.changes)
    if not plans:
        return None
    settings = min(plans, key=lambda names: (-plans[names], names))
    theirs = [
        one.changes for one in same if tuple(change.setting for change in one.changes) == settings
    ]
    chosen = []
    held = theirs
    for i in range(len(settings)):
        change = _enough([changes[i] for changes in held])
        chosen.append(change)
        held = [changes for changes in held if _suffices(change, changes[i])]
    return GroupFix(tuple(chosen), len(held))


def _enough(changes: Sequence[SettingChange]) -> SettingChange:
    """Return the largest change in the most common direction, or the most frequent value."""
    directions = Counter(_direction(change) for change in changes)
    direction = max(directions, key=lambda way: (directions[way], way))
    going = [change for change in changes if _direction(change) == direction]
    if direction:
        return max(going, key=lambda change: direction * _number(change.new))
    values = Counter(repr(change.new) for change in going)
    most = max(values, key=lambda value: (values[value], value))
    return next(change for change in going if repr(change.new) == most)


def _suffices(chosen: SettingChange, needed: SettingChange) -> bool:
    direction = _direction(chosen)
    if not direction or _direction(needed) != direction:
        return chosen.new == needed.new
    return direction * _number(chosen.new) >= direction * _number(needed.new)


def _direction(change: SettingChange) -> int:
    """Return 1 for a raised value, -1 for a lowered one, and 0 for values without an order."""
    numbers = [
        value
        for value in (change.old, change.new)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    if not numbers or not isinstance(change.new, (int, float)) or isinstance(change.new, bool):
        return 0
    if len(numbers) < 2 or change.new < numbers[0]:
        return -1
    return 1


def _number(value: FactValue) -> float:
    assert isinstance(value, (int, float))  # noqa: S101 - a direction is one of numbers
    return float(value)
