"""Why a start inside the process failed: the words with which its processes ended decide, not all that mentions memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from oomguard.diagnosing import default_rules
from oomguard.engines.watched_start import EndedStart
from oomguard.incident import Diagnosis, Evidence, Incident, SettingInForce
from oomguard.observe.exceptions import exception_lines, may_be_oom
from oomguard.observe.scan import scan
from oomguard.observe.source import Line

_DEAD = "engine_dead"


def scan_start(ended: EndedStart, source: str, settings: Mapping[str, SettingInForce]) -> Diagnosis:
    """Return what a failed start died of, not yet explained; no incidents where it was not of memory, or of a death untold.

    Args:
        ended: the attempt.
        source: what the diagnosis is called.
        settings: those in force.
    """
    error = ended.error
    if error is None or not may_be_oom(error):
        return Diagnosis(source)
    own = _incidents(exception_lines(error))
    if not own:
        return Diagnosis(source)  # the starting process failed by itself, of something else
    ends = own
    if all(incident.kind == _DEAD for incident in own):
        words = _incidents(ended.last_words)
        if ended.last_words and not words:
            return Diagnosis(source)  # the process that died printed why, and it was not memory
        ends = words or own
    whole = scan(ended.lines, default_rules(), source, given=settings)
    if any("engine_error" in incident.facts for incident in ends) and all(i.kind == _DEAD for i in ends):
        return replace(whole, incidents=tuple(i for i in whole.incidents if i.kind == _DEAD))
    causes = {(i.kind, i.message) for i in ends if i.kind != _DEAD}
    if causes:
        told = tuple(i for i in whole.incidents if (i.kind, i.message) in causes)
        return replace(whole, incidents=told or whole.incidents)
    return _of_the_silent(ended, whole, settings)


def _of_the_silent(ended: EndedStart, whole: Diagnosis, settings: Mapping[str, SettingInForce]) -> Diagnosis:
    """Return what a process died of that told nothing: what it printed, and the kernel's count of kills."""
    printed = (Line(number, 0, text) for number, text in enumerate(ended.printed.splitlines(), 1))
    found = scan(printed, default_rules(), whole.source, given=settings)
    incidents = tuple(i for i in found.incidents if i.kind != _DEAD)
    if not incidents and ended.killed_for_memory:
        incidents = (_killed(),)
    dead = tuple(i for i in whole.incidents if i.kind == _DEAD)
    return replace(whole, incidents=incidents or dead)


def _killed() -> Incident:
    text = (
        "the kernel ended a process of the engine for memory: its cgroup counts one oom_kill more than before the start"
    )
    return Incident("host_oom", text, framework="host", evidence=(Evidence(text),))


def _incidents(lines: Iterable[Line]) -> tuple[Incident, ...]:
    return scan(lines, default_rules()).incidents
