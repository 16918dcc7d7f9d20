"""Define what oomguard needs from an engine.

Each engine is a folder here. Its files say what it can do; only those that apply are present:

- ``settings.toml``: the spelling of each setting, and its default.
- ``launch.py``: the functions of ``Launcher``, for an engine that a command starts.
- ``placement.toml``: how the engine gets a device, and what it logs once it has started
  (read by devices.py).
- ``effects.toml``: its servers, caches, and log lines of requests (read by server.py).
- ``insight.py``: the functions of ``Insight``, for an engine that shows more than its log.
- ``watched_calls.py``: ``watch(handler, often, is_inside)``, for an engine whose calls run in
  this process; each call is a ``WatchedCall``. ``held_bytes()`` and ``move_to_host()`` are for the
  results of earlier calls that a library keeps on the device.
- ``call_recorder.py``: ``watch(handler)``, for calls that a watch records and never changes.
- ``watched_starts.py``: ``watch(handler)``, for an engine that a program starts in this
  process; each start is a ``WatchedStart``.
- ``remote_tasks.py``: ``guarded(function, decorate)``, ``killed_before()`` and ``shelf()``, for a
  framework that runs functions in other processes.

rules/signatures has the messages with which an engine reports failures and its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from oomguard.core.facts import FactValue

if TYPE_CHECKING:
    from oomguard.core.facts import Fact, FactValue
    from oomguard.core.incident import EngineStart, Incident, SettingInForce
    from oomguard.engines.command import Launch, StartedEngine
    from oomguard.remedy.policy import LeastValue
    from oomguard.remedy.solution import FailureModel
    from oomguard.scan.source import Line


class KilledBefore(NamedTuple):
    """Earlier kills of the current task for memory: its run, their number, and who reports them."""

    run: str
    times: int
    by: str


class Shelf(Protocol):
    """A store in which the processes of one job leave short texts for each other."""

    def read(self, name: str) -> str | None:
        """Return the text with this name; None without one."""

    def write(self, name: str, text: str) -> None:
        """Store a text under this name, replacing an earlier one."""


class Launcher(Protocol):
    """The module ``launch`` of an engine: read, change and judge the command that starts it.

    Attributes:
        NAME: the engine's name.
        SPEAKS: words, in any case, one of which is in every output of the engine.
    """

    NAME: str
    SPEAKS: tuple[str, ...]

    def is_own_command(self, argv: tuple[str, ...]) -> bool:
        """Return whether the command is the engine's own, so that its flags reach the engine."""

    def reaches_scripts(self) -> bool:
        """Return whether settings can reach an engine that a script starts in its own code."""

    def settings_in_force(self, launch: Launch) -> dict[str, SettingInForce]:
        """Return the settings that the launch gives."""

    def carries(self, name: str) -> bool:
        """Return whether this setting of a launch can be changed."""

    def apply(self, launch: Launch, settings: Mapping[str, FactValue], session: Path) -> Launch:
        """Return the launch with these settings; ``session`` is a folder of this run for files."""

    def shown(self, launch: Launch, settings: Mapping[str, FactValue]) -> str:
        """Return a shell line that runs the launch with these settings, without oomguard run."""

    def took_effect(self, launch: Launch, session: Path) -> bool:
        """Return whether the settings of ``apply`` reached the engine, as far as is known."""

    def keep_measured(self, starts: tuple[EngineStart, ...], source: str, session: str) -> bool:
        """Store a session's measurements for later plans; return whether there were any."""

    def measured(
        self, sessions: Collection[str] | None, model: str | None = None
    ) -> tuple[str, ...]:
        """Return what these sessions stored (None: all), or what a model has, one line each."""

    def forget_measured(self, sessions: Collection[str] | None, model: str | None = None) -> None:
        """Delete what ``measured`` returns."""


class Insight(Protocol):
    """The module ``insight`` of an engine: what is known beyond its command. It is optional."""

    def version(self, launch: Launch) -> str | None:
        """Return the version of the engine that a launch would start; None if not found."""

    def start_key(self, launch: Launch) -> StartKey | None:
        """Return what determines the memory of the launch; None if it cannot be read."""

    def watched(self, launch: Launch, session: Path) -> Launch:
        """Return the launch with what makes it report its engines, and nothing else changed."""

    def begun(self, launch: Launch, env: Mapping[str, str]) -> Launch:
        """Return a launch that already runs with these variables, as ``watched`` returns it."""

    def started(self, launch: Launch) -> tuple[StartedEngine, ...]:
        """Return the engines that a launch of ``watched`` or ``apply`` started, if reported."""

    def said(self, launch: Launch) -> tuple[Line, ...]:
        """Return the log lines of the launch's engines that were copied.

        The program may redirect its output, so its own log may not have them.
        """

    def survived_steps(self, launch: Launch) -> Sequence[Mapping[str, Any]]:
        """Return the steps so far that ran out of memory and did not end the launch's engines."""

    def limits(self, launch: Launch) -> Mapping[str, int]:
        """Return the memory limits of the launch's processes by fact, if any were reported."""

    def beaten_by(
        self, launch: Launch, name: str, facts: Mapping[str, Fact]
    ) -> SettingInForce | None:
        """Return what overrides a setting's flag and argument, with its source; None if nothing."""

    def carries(self, launch: Launch, name: str) -> bool:
        """Return whether this version of the engine has a setting; log why if it does not."""

    def asked_length(self, launch: Launch) -> Mapping[str, LeastValue]:
        """Return what the command's own requests need, by setting; empty if it is unknown."""

    def refused_length(
        self, text: str, settings: Mapping[str, FactValue]
    ) -> Mapping[str, LeastValue]:
        """Return what a request needs that the engine refused under these settings.

        The mapping is by setting, and empty if the engine refused none.
        """


class NoInsight(Insight):
    """The answers of an engine without a module ``insight``."""

    def version(self, launch: Launch) -> str | None:
        """Return None."""
        return None

    def start_key(self, launch: Launch) -> StartKey | None:
        """Return None."""
        return None

    def watched(self, launch: Launch, session: Path) -> Launch:
        """Return the launch unchanged."""
        return launch

    def begun(self, launch: Launch, env: Mapping[str, str]) -> Launch:
        """Return the launch unchanged."""
        return launch

    def started(self, launch: Launch) -> tuple[StartedEngine, ...]:
        """Return no engines."""
        return ()

    def said(self, launch: Launch) -> tuple[Line, ...]:
        """Return no lines."""
        return ()

    def survived_steps(self, launch: Launch) -> Sequence[Mapping[str, Any]]:
        """Return no steps."""
        return ()

    def limits(self, launch: Launch) -> Mapping[str, int]:
        """Return no limits."""
        return {}

    def beaten_by(
        self, launch: Launch, name: str, facts: Mapping[str, Fact]
    ) -> SettingInForce | None:
        """Return None."""
        return None

    def carries(self, launch: Launch, name: str) -> bool:
        """Return True: every version of the engine has its settings."""
        return True

    def asked_length(self, launch: Launch) -> Mapping[str, LeastValue]:
        """Return no lengths."""
        return {}

    def refused_length(
        self, text: str, settings: Mapping[str, FactValue]
    ) -> Mapping[str, LeastValue]:
        """Return no lengths."""
        return {}


class WatchedCall(Protocol):
    """One call of an engine, or of a function that works on rows, before it runs."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the whole call."""

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments of the whole call."""

    @property
    def model(self) -> Any:
        """The model that runs; its weights are loaded before the call. None without a model."""

    @property
    def rows(self) -> int:
        """The number of rows; 1 if it is unknown."""

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, with padding."""

    @property
    def max_new_tokens(self) -> int | None:
        """Tokens that the call may generate."""

    @property
    def not_splittable(self) -> str | None:
        """Why the call cannot be split into rows; None if it can."""

    @property
    def estimated_row_bytes(self) -> int | None:
        """Bytes that one row needs by a formula; None if no formula applies."""

    @property
    def waits_on_host(self) -> bool:
        """Whether results of parts are small enough to stay on the host until all are done."""

    @property
    def puts_back(self) -> Collection[str]:
        """Arguments that the call changes and ``around`` restores."""

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call on rows ``start`` to ``stop``."""

    def around(self, start: int, stop: int) -> AbstractContextManager[object]:
        """Return the context in which rows ``start`` to ``stop`` give what the whole call would."""

    def varied(
        self, changes: Mapping[str, FactValue], failed_in: Collection[str] | None
    ) -> WatchedCall | str:
        """Return the call with these settings changed.

        Return a text with the reason if that is impossible or would change the result in another
        way. ``failed_in`` are the functions in its failure's traceback; None: it has not run yet.
        """

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why a part's result cannot be joined to the others; None if it can.

        The part has ``rows`` rows.
        """

    def completed(self, result: Any, start: int, stop: int) -> Any:
        """Return the result of rows ``start`` to ``stop`` with what this variant left out."""

    def finished(self, result: Any, place: Callable[[Any, Any], Any]) -> Any:
        """Return the joined result of all rows as the whole call would return it.

        ``place`` moves a host tensor to a device.
        """

    @property
    def phase(self) -> str | None:
        """The engine's phase, one of incident.PHASES; None if the traceback shows it better."""

    @property
    def may_train(self) -> bool:
        """Whether it may be a training step, which is never split."""

    @property
    def pad_value(self) -> int | None:
        """The value that fills shorter rows of the result; None if all rows have one length."""

    @property
    def weigh(self) -> Callable[[Any, int, int], float | None] | None:
        """A function of a part's result and its rows: the weight of its mean loss.

        It exists if results are records of fields with one entry per row. Infinity means that the
        losses of parts add up. None: the result is one value whose entries are the rows.
        """

    @property
    def several(self) -> Collection[int]:
        """Other numbers of entries that a row may have in a result field: beams or sequences."""

    @property
    def layout(self) -> Mapping[str, tuple[int, int]]:
        """Result fields whose rows are not on the first axis: the axis, and the entries per row."""


# Rows of a call, tokens of its prompts, and its new tokens; None if unknown.
SizeOfCall = tuple[int | None, int | None, int | None]
# Reads a watched call from its object and its arguments.
ReadCall = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], WatchedCall]


@dataclass(frozen=True, slots=True)
class StatefulReader:
    """A reader for a call that changes its inputs, or draws random numbers.

    ``begin`` records the state before the call; ``read`` gets that as its last argument. ``size``
    reads only how large the call is.
    """

    read: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], WatchedCall]
    begin: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
    size: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], SizeOfCall]

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WatchedCall:
        """Read a call that has not run."""
        return self.read(model, args, kwargs, self.begin(model, args, kwargs))


@dataclass(frozen=True, slots=True)
class OverridingReader:
    """A reader for a method that overrides a watched one.

    If its call cannot be split, the calls inside it may be.
    """

    read: ReadCall

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WatchedCall:
        """Read a call."""
        return self.read(model, args, kwargs)


def with_recorded_state(
    read: ReadCall, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ReadCall:
    """Return a reader for a call that begins now: its present state is recorded."""
    inner = _innermost(read)
    if not isinstance(inner, StatefulReader):
        return read
    noted = inner.begin(model, args, kwargs)
    reads = inner.read
    return lambda called, given, named: reads(called, given, named, noted)


def size_of(
    read: ReadCall, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> SizeOfCall:
    """Return how large a call is, without recording its state."""
    inner = _innermost(read)
    if isinstance(inner, StatefulReader):
        return inner.size(model, args, kwargs)
    call = inner(model, args, kwargs)
    return call.rows, call.prompt_tokens, call.max_new_tokens


def _innermost(read: ReadCall) -> ReadCall:
    while isinstance(read, OverridingReader):
        read = read.read
    return read


# Every watched call goes through a handler. It gets the reader, the engine's function, its object
# and the arguments.
Handler = Callable[[ReadCall, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

# The same for calls that are only recorded; the first argument reads the size.
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


@dataclass(frozen=True, slots=True)
class StartKey:
    """What determines the memory of a server's start.

    Attributes:
        settings: the settings in the command by canonical name, with the model.
        others: all other parts of the command that take memory.
    """

    settings: Mapping[str, FactValue | None]
    others: frozenset[str]

    def is_same(self, other: StartKey, but: Collection[str]) -> bool:
        """Return whether both keys are the same, apart from the settings in ``but``."""
        if self.others != other.others:
            return False
        for name in (self.settings.keys() | other.settings.keys()) - set(but):
            if name not in self.settings or name not in other.settings:
                return False
            if self.settings[name] != other.settings[name]:
                return False
        return True


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

    # Return whether no caller waits for the engine any more.
    is_given_up: Callable[[], bool]

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
