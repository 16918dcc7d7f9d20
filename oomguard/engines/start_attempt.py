"""Define an engine's start in this process, and how an attempt to start it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.settings import value_in_force
from oomguard.scan.source import Line

if TYPE_CHECKING:
    from oomguard.remedy.solution import FailureModel


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine that a program started, as its plugin reported it.

    Settings are by canonical name.

    Attributes:
        model: the model, as the program named it; None if it was not reported.
        order: its number among the engines of its process, from 1.
        process: the id of the process that started it.
        arguments: what the program gave it; None if it was not reported.
        in_effect: the effective settings in its configuration.
        changed: the settings that oomguard changed.
    """

    model: str | None
    order: int
    process: int
    arguments: Mapping[str, FactValue] | None = None
    in_effect: Mapping[str, FactValue] = field(default_factory=dict)
    changed: Mapping[str, FactValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineChange:
    """New settings for the engines of one model, or for one engine.

    ``model`` None: any model. ``order`` None: any engine.
    """

    model: str | None
    order: int | None
    settings: Mapping[str, FactValue]

    def reaches(self, model: str | None, order: int | None) -> bool:
        """Return whether the change may be for an engine; None means unknown."""
        same_model = self.model is None or model is None or self.model == model
        return same_model and (self.order is None or order is None or self.order == order)


def failed_model(incident: Incident) -> str | None:
    """Return the model of the failed engine, as the engine printed it; None if it did not."""
    known = value_in_force("model", incident.settings, incident.facts)
    if known is not None and isinstance(known[0], str):
        return known[0]
    return None


def failed_engine(incident: Incident, started: Sequence[StartedEngine]) -> StartedEngine | None:
    """Return the engine that failed; None if several are possible.

    A failed start is the last one. Among serving engines only the model can identify it.
    """
    model = failed_model(incident)
    if incident.is_at_start:
        last = started[-1:]
        if last and (model is None or last[0].model in {None, model}):
            return last[0]
        return None
    same = [engine for engine in started if model is None or engine.model in {None, model}]
    if len(same) == 1:
        return same[0]
    return None


def changes_with(
    changes: Sequence[EngineChange],
    incident: Incident,
    started: Sequence[StartedEngine],
    new: Mapping[str, FactValue],
) -> tuple[EngineChange, ...]:
    """Return the changes with new settings for the failed engine, and the others unchanged."""
    engine = failed_engine(incident, started)
    several = len(started) > 1 and len({engine.process for engine in started}) == 1
    model = failed_model(incident)
    order = engine.order if engine is not None and several else None
    same = next(
        (change for change in changes if (change.model, change.order) == (model, order)), None
    )
    if same is None:
        return (*changes, EngineChange(model, order, dict(new)))
    joined = EngineChange(model, order, {**same.settings, **new})
    return tuple(joined if change is same else change for change in changes)


@dataclass(frozen=True, slots=True)
class StartResult:
    """How one attempt to start an engine ended.

    Attributes:
        result: the engine; None if the start failed.
        error: the exception; None if the start succeeded.
        lines: the log records of the engine's processes in time order, then the exception's lines.
        last_words: those of the tracebacks with which other processes ended.
        printed: captured output of processes that sent no records; "" if nothing was captured.
        killed_for_memory: whether the cgroup counted an OOM kill during the attempt.
        not_again: why it cannot start again in this process; None if it can.
        is_ended: whether oomguard stopped the start. Then its processes' ends mean nothing.
    """

    result: Any = None
    error: Exception | None = None
    lines: tuple[Line, ...] = ()
    last_words: tuple[Line, ...] = ()
    printed: str = ""
    killed_for_memory: bool = False
    not_again: str | None = None
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class RestartedEngine:
    """An engine that was restarted after its core had died while serving.

    Attributes:
        engine: the new engine.
        alone: whether unfinished requests run one at a time, to find the one that kills the engine.
        of_memory: whether the core ran out of memory.
    """

    engine: Any
    alone: bool = False
    of_memory: bool = False


# Called when an engine has died while serving, with how it ended, and whether it had delivered
# anything since its start. None: the engine stays dead.
RestartEngine = Callable[[StartResult, bool], RestartedEngine | None]


class WatchedStart(Protocol):
    """A start of an engine, first with the program's own arguments, then with changed ones.

    Attributes:
        phase: the phase of the start, one of incident.PHASES; None if the output shows it.
        reports_success: whether a start that succeeds at once counts as an attempt.
    """

    phase: str | None
    reports_success: bool

    def memory_model(self, incident: Incident) -> FailureModel | None:
        """Return the memory model of the failure; None if the engine's output determines it."""

    def attempt(
        self, changed: Mapping[str, FactValue], within_s: float | None = None
    ) -> StartResult:
        """Start the engine with these settings changed.

        Exceptions that are not failures, such as KeyboardInterrupt, are raised.

        Args:
            changed: settings that replace the program's own.
            within_s: the seconds after which the start is stopped; None: no limit.
        """

    def attend(self, engine: Any, make_again: RestartEngine) -> None:
        """Watch a started engine, and restart it with ``make_again`` if its core dies."""

    is_given_up: Callable[[], bool]  # returns whether no caller waits for the engine any more

    def clean_up(self) -> None:
        """End the processes of the last attempt, and remove its shared memory."""

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return the settings that the program gave the engine, by canonical name."""

    def carries(self, name: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether a setting can be changed; log why if a variable overrides it."""


# Reads a watched start from its function and the arguments.
ReadStart = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], WatchedStart]
# Every watched start goes through a handler. It gets the reader, the engine's function, its object
# and the arguments.
StartHandler = Callable[[ReadStart, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
