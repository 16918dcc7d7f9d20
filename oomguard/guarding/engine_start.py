"""Start an engine under a guard, again with the least change if memory runs out."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomguard.core.facts import Fact, FactValue, is_of_type
from oomguard.core.incident import (
    PATCHED,
    Attempt,
    Diagnosis,
    Effect,
    Evidence,
    Incident,
    SettingInForce,
)
from oomguard.core.log import get_logger
from oomguard.core.process import disabled
from oomguard.core.settings import SETTING_FACTS
from oomguard.guarding.failure import clear, in_phase, is_memory_failure
from oomguard.guarding.intercept import GuardEvents, inside_call

if TYPE_CHECKING:
    from oomguard.engines.protocol import ReadStart, RestartedEngine, StartResult, WatchedStart
    from oomguard.probe.nvml import Device
    from oomguard.scan.source import Line

# This module loads with the first start, and the modules that diagnose with the first failure.

# The words with which a start's processes ended decide, not everything that mentions memory.

_DEAD = "engine_dead"


def scan_start(
    ended: StartResult, source: str, settings: Mapping[str, SettingInForce]
) -> Diagnosis:
    """Return the memory failures of a failed start, not yet explained; none for other failures.

    An unexplained death of the engine core counts too.

    Args:
        ended: the attempt.
        source: the name of the diagnosis.
        settings: the effective settings.
    """
    from oomguard.diagnosis import default_rules
    from oomguard.scan.exceptions import exception_lines
    from oomguard.scan.scan import scan

    error = ended.error
    if error is None or not is_memory_failure(error):
        return Diagnosis(source)
    own = _incidents(exception_lines(error))
    if not own:
        # The starting process itself failed for another reason.
        return Diagnosis(source)
    ends = own
    if all(incident.kind == _DEAD for incident in own):
        words = _incidents(ended.last_words)
        if ended.last_words and not words:
            # The dead process printed a reason other than memory.
            return Diagnosis(source)
        ends = words or own
    whole = scan(ended.lines, default_rules(), source, given=settings)
    causes = set()
    for incident in ends:
        if incident.kind != _DEAD:
            causes.add((incident.kind, incident.message))
    if causes:
        # The log may also have older failures, which did not end this start.
        named = []
        for incident in whole.incidents:
            if (incident.kind, incident.message) in causes:
                named.append(incident)
        return replace(whole, incidents=tuple(named) or whole.incidents)
    if any("engine_error" in incident.facts for incident in ends):
        return replace(whole, incidents=_deaths(whole))
    return _of_the_silent(ended, whole, settings)


def _deaths(diagnosis: Diagnosis) -> tuple[Incident, ...]:
    return tuple(filter(_is_death, diagnosis.incidents))


def _is_death(incident: Incident) -> bool:
    return incident.kind == _DEAD


def _of_the_silent(
    ended: StartResult, whole: Diagnosis, settings: Mapping[str, SettingInForce]
) -> Diagnosis:
    """Diagnose a process that died silently, from its output and the cgroup's OOM kills."""
    from oomguard.diagnosis import default_rules
    from oomguard.scan.scan import scan
    from oomguard.scan.source import Line

    printed = (Line(number, 0, text) for number, text in enumerate(ended.printed.splitlines(), 1))
    found = scan(printed, default_rules(), whole.source, given=settings)
    incidents = tuple(itertools.filterfalse(_is_death, found.incidents))
    if not incidents and ended.killed_for_memory:
        incidents = (_killed(),)
    return replace(whole, incidents=incidents or _deaths(whole))


def _killed() -> Incident:
    text = (
        "the kernel killed a process of the engine because memory ran out: its cgroup counts one "
        "more oom_kill than before the start"
    )
    return Incident("host_oom", text, framework="host", evidence=(Evidence(text),))


def _incidents(lines: Iterable[Line]) -> tuple[Incident, ...]:
    from oomguard.diagnosis import default_rules
    from oomguard.scan.scan import scan

    return scan(lines, default_rules()).incidents


# Deaths in a row without any output between them: the third finds the request, more are a loop.
_MOST_DEATHS = 5
_ALWAYS = frozenset({"kv_cache_available_bytes", "kv_cache_capacity_tokens"})


def run_of(
    owner: GuardEvents,
    read: ReadStart,
    wrapped: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StartRun | None:
    """Return the run of a start; None if its arguments cannot be read."""
    try:
        return StartRun(
            owner, read(wrapped, args, kwargs), getattr(wrapped, "__qualname__", "start")
        )
    except Exception as error:  # noqa: BLE001
        # The engine itself rejects odd arguments.
        get_logger().debug("a start is not watched", reason=f"{type(error).__name__}: {error}")
        return None


class StartRun:
    """One start under a guard.

    Args:
        owner: the guard, which records each attempt, incident and patch.
        start: the start with the program's arguments.
        source: the name of the diagnosis.
    """

    def __init__(self, owner: GuardEvents, start: WatchedStart, source: str) -> None:
        from oomguard.retry import Ledger

        self._owner = owner
        self._start = start
        self._source = source
        self._ledger = Ledger(owner.policy)
        self._first_error: Exception | None = None
        self._incident: Incident | None = None
        self._deaths = 0
        self._devices: Mapping[int, Device] = {}

    def run(self) -> tuple[Any, Exception | None]:
        """Return the engine and None, or None and the first exception, with its notes."""
        ledger = self._ledger
        for _ in ledger.rounds():
            if ledger.patches:
                self._announce()
            ended = self._attempt()
            if ended.error is None:
                self._succeeded(ended)
                self._owner.ended(
                    tuple(ledger.attempts) if self._first_error is not None else (), None
                )
                return ended.result, None
            self._failed(ended.error, ended)
        if self._first_error is not None and self._incident is not None:
            with _keeping_quiet("the note"):
                self._annotate(self._first_error, self._incident)
        self._owner.ended(tuple(ledger.attempts), None)
        return None, self._first_error

    def attend(self, engine: Any) -> None:
        """Watch a started engine, and restart it after its death if the guard permits it."""
        # Their frames hold the failed engine.
        self._first_error = self._incident = None
        with _keeping_quiet("attending the engine"):
            self._start.attend(engine, self._made_again)

    def _made_again(self, ended: StartResult, progressed: bool) -> RestartedEngine | None:
        """Restart a dead engine: with the least change after an OOM, otherwise unchanged."""
        # An engine that made progress since its last death is not in a loop.
        if progressed:
            self._deaths = 1
        else:
            self._deaths = self._deaths + 1
        incident = self._died(ended, self._ledger.reopen(anew=progressed))
        of_memory = incident is not None and incident.is_oom
        may_restart = (of_memory or self._owner.restart) and self._ledger.leaves_another()
        if ended.error is None or disabled() or not may_restart or self._deaths > _MOST_DEATHS:
            self._give_up(ended.error, incident)
            return None
        # Without a change, the same requests together would end the engine again.
        alone = not self._ledger.pending and (of_memory or self._deaths > 1)
        self._clean_up()
        self._first_error = ended.error
        self._incident = incident
        # Calls inside the start are not watched, and another guard may be active.
        token = inside_call.set(True)
        try:
            engine, error = self.run()
        finally:
            inside_call.reset(token)
        self._first_error = self._incident = None
        if error is None:
            from oomguard.engines.protocol import RestartedEngine

            return RestartedEngine(engine, alone=alone, of_memory=of_memory)
        return None

    def _died(self, ended: StartResult, ran: Attempt) -> Incident | None:
        """Record a death, and choose the changes for the restart."""
        diagnosis = Diagnosis(self._source)
        with _keeping_quiet("the diagnosis"):
            diagnosis = self._diagnose(ended)
        incident = diagnosis.first_cause
        self._owner.replace(
            ran, self._ledger.end(incident, error=type(ended.error).__name__, measured=ran.measured)
        )
        if incident is None:
            get_logger().warning("the engine died", error=str(ended.error))
            return None
        self._owner.incident(diagnosis)
        get_logger().warning("the engine died", **_fields(incident))
        self._ledger.choose(incident, lambda name: self._start.carries(name, incident.facts))
        return incident

    def _give_up(self, error: Exception | None, incident: Incident | None) -> None:
        if error is not None and incident is not None:
            with _keeping_quiet("the note"):
                self._annotate(error, incident)
        self._owner.ended(tuple(self._ledger.attempts), None)

    def _succeeded(self, ended: StartResult) -> None:
        measured: dict[str, float] = {}
        with _keeping_quiet("what the start measured"):
            if self._ledger.attempts:
                measured = self._measured(ended)
            else:
                measured = {}
        is_reported = self._start.reports_success or bool(self._ledger.attempts)
        attempt = self._ledger.end(measured=measured)
        if is_reported:
            self._owner.record(attempt)
        # The free memory before a later death will be different.
        self._devices = {}

    def _attempt(self) -> StartResult:
        """Make one attempt.

        A change that cannot be made ends the run as a failed attempt, not as an exception.
        """
        from oomguard import retry
        from oomguard.engines.protocol import StartResult

        with _keeping_quiet("reading the devices"):
            self._devices = self._devices or retry.devices_by_index()
        try:
            return self._start.attempt(self._ledger.settings, self._owner.start_within_s)
        except (TypeError, ValueError) as problem:
            # Without changes these are the program's own arguments, and the error is its own.
            if not self._ledger.settings:
                raise
            return StartResult(error=problem)

    def _failed(self, error: Exception, ended: StartResult) -> None:
        """Record a failed attempt, choose the next changes, and clean up."""
        diagnosis = Diagnosis(self._source)
        if not ended.is_ended:
            with _keeping_quiet("the diagnosis"):
                diagnosis = self._diagnose(ended)
        incident = diagnosis.first_cause
        attempt = self._ledger.end(incident, error=type(error).__name__)
        self._owner.record(attempt)
        if incident is None:
            # A later failure for another reason must not hide the failure that led to it.
            is_first = self._first_error is None
            self._first_error = self._first_error or error
            # The processes' output has been read, so no outer guard needs to guess.
            _mark_explained(error)
            if ended.not_again is not None:
                error.add_note(f"oomguard: {ended.not_again}")
            if not is_first and not ended.is_ended:
                get_logger().warning(
                    "the changed start failed for another reason",
                    error=f"{type(error).__name__}: {error}",
                )
                self._clean_up()
            return
        self._first_error = self._first_error or error
        self._incident = incident
        self._owner.incident(diagnosis)
        get_logger().warning("out of memory" if incident.is_oom else "failed", **_fields(incident))
        if ended.not_again is None:
            self._ledger.choose(incident, lambda name: self._start.carries(name, incident.facts))
        else:
            get_logger().warning("not started again", reason=ended.not_again)
        if self._ledger.pending:
            # Its frames hold the failed engine.
            clear(error)
        if incident.is_oom:
            with _keeping_quiet("looking for left-over engines"):
                _name_orphans()
        self._clean_up()

    def _clean_up(self) -> None:
        from oomguard import retry

        with _keeping_quiet("cleaning up"):
            self._start.clean_up()
            # The driver frees a dead process's memory a moment later; a start before that fails.
            if self._ledger.pending and (held := retry.wait_until_free(self._devices, self._stops)):
                get_logger().warning("memory is still held after the failed attempt", held=held)

    def _stops(self) -> bool:
        return disabled() or self._start.is_given_up()

    def _diagnose(self, ended: StartResult) -> Diagnosis:
        """Diagnose a failed attempt; without incidents if it did not run out of memory."""
        from oomguard.diagnosis import default_rules

        scanned = scan_start(ended, self._source, self._in_force())
        scanned = replace(scanned, incidents=tuple(self._as_it_ran(i) for i in scanned.incidents))
        if self._start.phase is not None:
            scanned = in_phase(scanned, self._start.phase)
        first = scanned.first_cause
        if first is None:
            memory_model = None
        else:
            memory_model = self._start.memory_model(first)
        return self._ledger.diagnose(
            scanned, default_rules(), local_models=memory_model is None, memory_model=memory_model
        )

    def _in_force(self) -> dict[str, SettingInForce]:
        """Return the effective settings: the program's, and those that oomguard changed."""
        given = self._start.settings_in_force()
        changed = {}
        for name, value in self._ledger.settings.items():
            changed[name] = _changed(name, value, given)
        return {**given, **changed}

    def _as_it_ran(self, incident: Incident) -> Incident:
        """Return the incident with changed values instead of those in the program's arguments."""
        facts = dict(incident.facts)
        for name, value in self._ledger.settings.items():
            fact = SETTING_FACTS.get(name, "")
            if fact in facts and facts[fact].line is None and is_of_type(fact, value):
                facts[fact] = Fact(fact, value, PATCHED)
        if self._ledger.settings:
            return replace(incident, facts=facts)
        return incident

    def _measured(self, ended: StartResult) -> dict[str, float]:
        """Return the printed figures that were predicted, and those of the KV cache."""
        from oomguard.diagnosis import default_rules
        from oomguard.scan.scan import Scanner

        scanner = Scanner(default_rules())
        for line in ended.lines:
            scanner.push(line)
        scanner.flush()
        wanted = set(_ALWAYS).union(*(patch.predicts for patch in self._ledger.patches))
        measured = {}
        for name, value in scanner.measured.items():
            if name in wanted:
                measured[name] = value
        return measured

    def _announce(self) -> None:

        patches = self._ledger.patches
        log = get_logger()
        for patch in patches:
            self._owner.patched(patch)
        log.info("starting again", **{patch.setting: patch.change for patch in patches})
        if any(patch.effect >= Effect.REDUCES_CAPACITY for patch in patches):
            log.warning(
                "this engine starts with reduced settings", **{p.setting: p.change for p in patches}
            )

    def _annotate(self, error: Exception, incident: Incident) -> None:
        from oomguard.guarding.advice import start_note

        # Some exception types accept no notes.
        with contextlib.suppress(AttributeError, TypeError):
            error.add_note(start_note(incident, self._ledger.attempts))
        _mark_explained(error)


@contextlib.contextmanager
def _keeping_quiet(what: str) -> Iterator[None]:
    """Log an error of oomguard itself; the program still gets its engine or the engine's error."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 - an error of oomguard itself
        get_logger().error(f"{what} failed", reason=f"{type(problem).__name__}: {problem}")


def _name_orphans() -> None:
    """Warn about engines that outlived their program, such as a crashed notebook.

    They hold memory, and only their owner may end them.
    """
    from oomguard.probe.checks import left_over_checks

    found = next(left_over_checks((), {}))
    if found.status == "problem":
        get_logger().warning(found.text, end=found.advice)


def _mark_explained(error: Exception) -> None:
    """Mark an exception as explained, so that an outer guard adds no diagnosis."""
    # An exception type with slots accepts no other attributes; its user then reads two notes.
    with contextlib.suppress(AttributeError, TypeError):
        error.__oomguard__ = True  # type: ignore[attr-defined]


def _changed(name: str, value: FactValue, given: dict[str, SettingInForce]) -> SettingInForce:
    return SettingInForce(name, value, name in given, PATCHED)


def _fields(incident: Incident) -> dict[str, Any]:
    """Return a failure's fields for the log."""
    if incident.causes:
        cause = incident.causes[0].id
    else:
        cause = None
    if incident.location.process is None:
        process = {}
    else:
        process = {"process": incident.location.process}
    return {"kind": incident.kind, "what": incident.headline, "cause": cause, **process}
