"""A start of an engine inside this process: what a guard asks of it, and how one attempt of it
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.settings import value_in_force
from oomguard.scan.source import Line

if TYPE_CHECKING:
    from oomguard.remedy.from_estimate import FailureModel


# An engine that a program started, as what runs inside it told it, and the changes that are meant
# for it alone.


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """One engine; the settings are by canonical name.

    Attributes:
        model: as the program named it.
        order: which of its process's engines it is, from 1.
        process: number of the process that started it.
        arguments: what the program gave it, None where that was not told.
        in_effect: what the engine made of it.
        changed: what was changed for us.
    """

    model: str | None
    order: int
    process: int
    arguments: Mapping[str, FactValue] | None = None
    in_effect: Mapping[str, FactValue] = field(default_factory=dict)
    changed: Mapping[str, FactValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineChange:
    """Settings for the engines of one model, or for one of them; None: of any model, of
    any order.
    """

    model: str | None
    order: int | None
    settings: Mapping[str, FactValue]

    def reaches(self, model: str | None, order: int | None) -> bool:
        """Return whether an engine may be one that it is for."""
        same_model = self.model is None or model is None or self.model == model
        return same_model and (self.order is None or order is None or self.order == order)


def failed_model(incident: Incident) -> str | None:
    """Return the model of the engine that failed, as it printed it."""
    known = value_in_force("model", incident.settings, incident.facts)
    if known is not None and isinstance(known[0], str):
        return known[0]
    return None


def failed_engine(incident: Incident, started: Sequence[StartedEngine]) -> StartedEngine | None:
    """Return the engine that a failure is of; None where it is not known which.

    A start that failed is the last one. Of those that serve, only one of its model can be told.
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
    """Return the changes with new settings for the engine that failed; those of other engines stay
    theirs.
    """
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
class EndedStart:
    """One attempt to start an engine, as it ended.

    Attributes:
        result: the engine; None where it failed.
        error: what the attempt raised; None where it ran.
        lines: what the engine's processes told, in the order of time, and the exception's own lines
            behind them.
        last_words: of these the tracebacks with which its other processes ended.
        printed: what its processes printed where nothing else was told; "" where that was not
            taken.
        killed_for_memory: whether the kernel's count says that it ended a process of the engine for
            memory.
        not_again: why it must not be started again in this process; None where it may.
        is_ended: whether it was ended from here, late or given up: how its processes died then
            tells nothing.
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
class MadeAgain:
    """An engine that was made again after its core had died at work.

    Attributes:
        engine: the new one.
        alone: whether what is unfinished is to run one request at a time, to find the one that the
            engine dies of.
        of_memory: whether it died for memory.
    """

    engine: Any
    alone: bool = False
    of_memory: bool = False


# What a start asks when its engine has died at work: how that was, and whether anything had come
# since it was made. None: it stays dead.
MakeAgain = Callable[[EndedStart, bool], MadeAgain | None]


class WatchedStart(Protocol):
    """One start of an engine, before it is made: attempted with the program's own arguments, then
    with changed ones.

    Attributes:
        phase: what the engine does in it, one of incident.PHASES; None where what it prints tells.
        tells_success: whether one that ran at once is an attempt to be told of.
    """

    phase: str | None
    tells_success: bool

    def behind(self, incident: Incident) -> FailureModel | None:
        """Return the model of what failed; None where it is read from what the engine printed."""

    def attempt(
        self, changed: Mapping[str, FactValue], within_s: float | None = None
    ) -> EndedStart:
        """Start the engine with these settings changed; what is no failure (Ctrl-C) is raised as it
        is.

        Args:
            changed: the values that take the place of the program's own.
            within_s: the seconds after which a start that goes on is ended; None: never.
        """

    def attend(self, engine: Any, make_again: MakeAgain) -> None:
        """Stay with an engine that was made, and have it made again where it dies at work."""

    is_given_up: Callable[[], bool]  # whether nobody waits for the engine any more

    def leave_nothing(self) -> None:
        """End what the attempt before left: processes and shared memory of its engine, and no
        others.
        """

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return what the program gave the engine, by canonical name."""

    def carries(self, name: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether a setting can be changed, by the facts of what failed; say why where
        something beats it.
        """


# How a watched start is read from the function that makes it, and its arguments.
ReadStart = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], WatchedStart]
# What every watched start goes through: the reader, the engine's own function, its object and the
# arguments.
StartHandler = Callable[[ReadStart, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
