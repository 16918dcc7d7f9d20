"""One failure told by several logs: a process's output and its errors; in a Ray session the worker, its driver and Ray's own processes.

A driver repeats what its workers print, behind ``(NAME pid=N)``, and prints the error of a task once more; raylet and GCS write down why
an actor died; that an engine died stands in the errors of a process whose output has the cause. It is one failure, told by the log
nearest to it; the others are places where it is told again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from oomguard.fleet.finding import Finding

# Whose log tells most of a failure that no worker's own log has: the program's, then those of Ray's processes.
_NEAREST: Final = ("job-driver-", "replica_", "python-core-worker", "python-core-driver", "raylet", "gcs_server")
_KILL: Final = ("host_oom", "ray")
_DEAD: Final = "engine_dead"
# The cause of an end whose own exception the log has.
_EXPLAINED: Final = "not_memory"
# Ray's and SLURM's NAME.out and NAME.err, torchrun's stdout.log and stderr.log, packed or not.
_STREAM: Final = re.compile(r"(?:\.(?:out|err)|(?:(?<=/)|^)std(?:out|err)(?:\.log)?)(?:\.gz)?$")
_PID: Final = re.compile(r"\bpid=(\d+)")
# A log may cut a message, or put a hint behind it.
_MESSAGE_CHARS: Final = 160


def told_once(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, in their order, without those that another log of the session tells at first hand; it names their places."""
    same: dict[tuple[str, str], list[Finding]] = {}
    order = list(findings)
    for one in order:
        if one.message:
            same.setdefault((one.kind, " ".join(one.message.split())[:_MESSAGE_CHARS]), []).append(one)
    again: dict[int, Finding] = {}  # by the one that repeats: the one that it repeats
    for together in same.values():
        if len(together) > 1 and any(one.writer.session for one in together):
            again |= _repeats(together)
    for retold in (_killed, _dead):
        again |= retold([one for one in order if id(one) not in again])
    places: dict[int, list[tuple[str, int | None]]] = {}
    for one in order:
        if (first := again.get(id(one))) is not None:
            places.setdefault(id(first), []).append((one.source, one.line))
    return [
        replace(one, told_again=tuple(places[id(one)])) if id(one) in places else one
        for one in order
        if id(one) not in again
    ]


def _repeats(together: Sequence[Finding]) -> dict[int, Finding]:
    """Return, of findings with the same words, which repeat which."""
    again: dict[int, Finding] = {}
    by_pid: dict[str | None, Finding] = {one.writer.pid: one for one in together if one.writer.pid is not None}
    sessions = dict.fromkeys(one.writer.session for one in together if one.writer.session)
    for session in sessions:
        of_it = [one for one in together if one.writer.session == session]
        own = [one for one in of_it if one.writer.pid is not None]
        others = [one for one in of_it if one.writer.pid is None]
        nearest = own[0] if own else min(others, key=_distance)
        for one in others:
            pid = _pid(one)
            if one is not nearest and (not own or pid is None or pid in by_pid):
                again[id(one)] = by_pid.get(pid, nearest)
    for one in together:  # a driver's output that lies elsewhere: it names the workers
        if one.writer.session is None and (first := by_pid.get(_pid(one))) is not None:
            again[id(one)] = first
    return again


def _killed(findings: Sequence[Finding]) -> dict[int, Finding]:
    """Return which kills of Ray's memory monitor stand in a raylet's log, in its own words, beside a log that says whom it hit."""
    kills = [one for one in findings if one.writer.session and (one.kind, one.framework) == _KILL]
    hit = {one.writer.session: one for one in reversed(kills) if not _is_raylet(one)}
    return {id(one): hit[one.writer.session] for one in kills if _is_raylet(one) and one.writer.session in hit}


def _is_raylet(one: Finding) -> bool:
    return one.writer.process == "raylet"


def _dead(findings: Sequence[Finding]) -> dict[int, Finding]:
    """Return which ends of engines, of causes that their logs do not have, are those of failures that another log tells."""
    dead = [one for one in findings if one.kind == _DEAD and one.cause != _EXPLAINED]
    causes = [one for one in findings if one.is_oom or one.cause == _EXPLAINED] if dead else []
    beside = {_both(one.source): one for one in reversed(causes)}
    workers: dict[tuple[str | None, str | None], Finding] = {
        (one.writer.session, one.writer.pid): one for one in reversed(causes) if one.writer.session
    }
    sessions: dict[str | None, Finding] = {one.writer.session: one for one in reversed(causes) if one.writer.session}
    again: dict[int, Finding] = {}
    for one in dead:
        pid = one.writer.pid or _pid(one)
        cause = beside.get(_both(one.source)) or workers.get((one.writer.session, pid))
        if cause is None and one.writer.pid is None:
            cause = sessions.get(one.writer.session)
        if cause is not None and cause.source != one.source:
            again[id(one)] = cause
    return again


def _both(source: str) -> str:
    """Return what the names of a process's output and of its errors have in common."""
    return _STREAM.sub("", source)


def _pid(one: Finding) -> str | None:
    found = _PID.search(one.process or "")
    return found and found[1]


def _distance(one: Finding) -> int:
    name = (one.writer.process or "").rpartition("/")[2]
    return next((i for i, begins in enumerate(_NEAREST) if name.startswith(begins)), len(_NEAREST))
