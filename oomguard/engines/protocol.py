"""What oomguard asks of an engine.

An engine is a folder here, and what lies in it says what it can do:

- ``settings.toml``: how it spells each setting, and its defaults (read by surfaces.py).
- ``launch.py``: the functions of ``Launcher``, for an engine that a command starts.
- ``placement.toml``: how it is given a device, and how it tells that it has started (read by
  placement.py); an engine may have none.
- ``effects.toml``: its servers, caches, and how it tells of requests (read by effects.py); an
  engine may have none.
- ``insight.py``: the functions of ``Insight``, for an engine that tells more of itself than its log
  does.
- ``calls.py``: ``watch(handler, often, is_inside)``, for an engine that is called inside the
  process; a call of it answers to ``WatchedCall``.
- ``results.py``: ``held_bytes()`` and ``move_to_host()``, for a library that keeps the results of
  calls on the device.
- ``seen_calls.py``: ``watch(handler)``, for calls that are shown where a program watches its
  memory, and never changed.
- ``starts.py``: ``watch(handler)``, for an engine that a program starts inside the process; a start
  answers to ``WatchedStart``.

How its log tells a failure, and its end, stands in rules/signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import EngineStart, SettingInForce
from oomguard.engines.start_key import StartKey

if TYPE_CHECKING:
    from oomguard.engines.command import Launch
    from oomguard.engines.start_attempt import StartedEngine
    from oomguard.remedy.policy import LeastValue
    from oomguard.scan.source import Line


# What an engine that spreads one job over many processes tells one of them of the others.


class KilledBefore(NamedTuple):
    """That what runs now was killed for memory before: which run of it this is, how often, and by
    whom.
    """

    run: str
    times: int
    by: str


class Shelf(Protocol):
    """Where the processes of one job leave short texts for each other."""

    def read(self, name: str) -> str | None:
        """Return the text of this name, None where there is none."""

    def write(self, name: str, text: str) -> None:
        """Leave a text under this name, in the place of an earlier one."""


class Launcher(Protocol):
    """The module ``launch`` of an engine: how a command that starts it is read, changed, and judged
    at its end.

    Attributes:
        NAME: the engine's name.
        SPEAKS: words of which one, in any case, stands in every output of the engine.
    """

    NAME: str
    SPEAKS: tuple[str, ...]

    def is_own_command(self, argv: tuple[str, ...]) -> bool:
        """Return whether the command itself is the engine's, so that its flags reach the engine."""

    def reaches_scripts(self) -> bool:
        """Return whether settings can be carried into a program that starts the engine
        by itself.
        """

    def settings_in_force(self, launch: Launch) -> dict[str, SettingInForce]:
        """Return the settings that the launch itself gives."""

    def carries(self, name: str) -> bool:
        """Return whether a launch can be changed by this setting."""

    def apply(self, launch: Launch, settings: Mapping[str, FactValue], session: Path) -> Launch:
        """Return the launch with these settings; ``session`` is a folder of this run, for what has
        to lie in a file.
        """

    def shown(self, launch: Launch, settings: Mapping[str, FactValue]) -> str:
        """Return a line to paste that runs the launch with these settings, without ``oomguard run``
        around it.
        """

    def took_effect(self, launch: Launch, session: Path) -> bool:
        """Return whether the settings of ``apply`` reached the engine, as far as can be told."""

    def keep_measured(self, starts: tuple[EngineStart, ...], source: str, session: str) -> bool:
        """Keep what a start of a session measured for the plans to come; return whether there was
        anything to keep.
        """

    def measured(
        self, sessions: Collection[str] | None, model: str | None = None
    ) -> tuple[str, ...]:
        """Return what was kept of these sessions (None: of all) or of a model, a line each."""

    def forget_measured(self, sessions: Collection[str] | None, model: str | None = None) -> None:
        """Drop what ``measured`` returns."""


class Insight(Protocol):
    """The module ``insight`` of an engine: what is known of engines beyond their command. No engine
    needs one.
    """

    def version(self, launch: Launch) -> str | None:
        """Return the version of the engine that a launch would start, before it has; None where
        that is not found.
        """

    def start_key(self, launch: Launch) -> StartKey | None:
        """Return what decides the memory of the launch, so that other words for it are known; None
        where that cannot be read.
        """

    def watched(self, launch: Launch, session: Path) -> Launch:
        """Return the launch with what makes it tell which engines it starts, and nothing else
        changed.
        """

    def begun(self, launch: Launch, env: Mapping[str, str]) -> Launch:
        """Return the launch that runs already, started with these variables, as ``watched`` would
        have returned it.
        """

    def started(self, launch: Launch) -> tuple[StartedEngine, ...]:
        """Return the engines that a launch of ``watched`` or ``apply`` started, as far as they were
        told.
        """

    def said(self, launch: Launch) -> tuple[Line, ...]:
        """Return what the engines of such a launch logged, as far as it was noted: their output may
        go where nobody reads it.
        """

    def limits(self, launch: Launch) -> Mapping[str, int]:
        """Return what a process of such an engine may have of memory, by fact, where that is
        limited and was noted.
        """

    def beaten_by(
        self, launch: Launch, name: str, facts: Mapping[str, Fact]
    ) -> SettingInForce | None:
        """Return what sets a setting over all that can be carried, named by its source; None where
        nothing does.
        """

    def carries(self, launch: Launch, name: str) -> bool:
        """Return whether a setting that the engine carries may be carried into this one, by its
        version; say why where it may not.
        """

    def asked_length(self, launch: Launch) -> Mapping[str, LeastValue]:
        """Return what the command's own requests need, by setting; empty where it does not tell."""

    def refused_length(
        self, text: str, settings: Mapping[str, FactValue]
    ) -> Mapping[str, LeastValue]:
        """Return what a request needs that the engine refused under one of these settings, by
        setting; empty where it refused none.
        """


class WatchedCall(Protocol):
    """One call of an engine, or of a function that works on rows, before it is run."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the whole call."""

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments of the whole call."""

    @property
    def model(self) -> Any:
        """The model that runs; its weights are alive before the call. None where the
        call has none.
        """

    @property
    def rows(self) -> int:
        """Rows of the call; 1 where it has none that can be told."""

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, padding included."""

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens that the call may generate."""

    @property
    def not_splittable(self) -> str | None:
        """Why its rows cannot be run apart; None where they can."""

    @property
    def estimated_row_bytes(self) -> int | None:
        """Bytes that one row needs in closed form; None if no closed form holds."""

    @property
    def waits_on_host(self) -> bool:
        """Whether the results of parts are so small that they wait on the host, where they take no
        room from later parts.
        """

    @property
    def puts_back(self) -> Collection[str]:
        """Arguments that the call changes and ``around`` puts back to what they were."""

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call on rows ``start`` to ``stop``."""

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return what is entered while rows ``start`` to ``stop`` run, so that they give what the
        whole call would.
        """

    def varied(
        self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None
    ) -> WatchedCall | str:
        """Return the call with these settings changed, or why it cannot be made so, or gives
        another result than they say.

        ``failed_in`` are the functions that its failure went through; None: it has not been run.
        """

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why the result of a part of ``rows`` rows cannot be put together with others; None
        where it can.
        """

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return the result of rows ``start`` to ``stop`` as the call gives it that was made, where
        this one was given less of it.
        """

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the result of all rows, put together, as the whole call would have given it.

        ``place`` puts a tensor of the host on a device.
        """

    @property
    def phase(self) -> str | None:
        """What the engine does in it, one of incident.PHASES; None where the frames tell more."""

    @property
    def may_train(self) -> bool:
        """Whether it may be a training step, which is never run in parts."""

    @property
    def pad_value(self) -> int | None:
        """What fills a row of the result that ended earlier than others; None where all have one
        length.
        """

    @property
    def weigh(self) -> Callable[[Any, int, int], float | None] | None:
        """What the mean loss in a part's result weighs, by that and its rows, where results are
        records of fields.

        Each field then holds one entry a row. Infinite where the losses of parts add up. None: the
        result is one value, whose entries are the rows.
        """

    @property
    def several(self) -> Collection[int]:
        """How many entries a row may have in a field of the result, beside one: of beams, or of
        sequences that are returned for it.
        """

    @property
    def layout(self) -> Mapping[str, tuple[int, int]]:
        """At which axis fields of the result hold their rows, and how many entries a row has there;
        others at the first.
        """


# Rows of a call, tokens of its prompts, and those that it may generate; None where nothing tells.
SizeOfCall = tuple[int | None, int | None, int | None]
# How a watched call is read from the object it is called on and its arguments.
ReadCall = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], WatchedCall]


@dataclass(frozen=True, slots=True)
class ReadBegun:
    """How a call is read that changes what it is given, or where random generators stand.

    ``begin`` notes that before the call is made; ``read`` gets it as its last argument. ``size`` is
    for who asks for no more.
    """

    read: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], WatchedCall]
    begin: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
    size: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], SizeOfCall]

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WatchedCall:
        """Read a call that has not been made."""
        return self.read(model, args, kwargs, self.begin(model, args, kwargs))


@dataclass(frozen=True, slots=True)
class ReadOverriding:
    """How a call is read of a method that overrides a watched one: where it cannot be split, the
    calls that it makes may be.
    """

    read: ReadCall

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WatchedCall:
        """Read a call."""
        return self.read(model, args, kwargs)


def begun(read: ReadCall, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReadCall:
    """Return how a call is read once it has been made, which is now begun."""
    inner = _innermost(read)
    if not isinstance(inner, ReadBegun):
        return read
    noted = inner.begin(model, args, kwargs)
    reads = inner.read
    return lambda called, given, named: reads(called, given, named, noted)


def size_of(
    read: ReadCall, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SizeOfCall:
    """Return how large a call is, and note nothing of what it will change."""
    inner = _innermost(read)
    if isinstance(inner, ReadBegun):
        return inner.size(model, args, kwargs)
    call = inner(model, args, kwargs)
    return call.rows, call.prompt_tokens, call.max_new_tokens


def _innermost(read: ReadCall) -> ReadCall:
    while isinstance(read, ReadOverriding):
        read = read.read
    return read


# What every watched call goes through: it gets the reader, the engine's own function, its object
# and the arguments.
Handler = Callable[[ReadCall, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

# What a call that is only shown goes through: it gets how its size is read, the engine's own
# function, its object and the arguments.
SeenCallHandler = Callable[
    [
        Callable[[tuple[Any, ...], Mapping[str, Any]], SizeOfCall],
        Callable[..., Any],
        Any,
        tuple[Any, ...],
        dict[str, Any],
    ],
    Any,
]
