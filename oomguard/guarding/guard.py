"""The guard: a decorator and a context manager that watch engine calls and remedy them one by one.

A context variable holds the guard in force, so threads and tasks outside it see nothing, and guards
nest: the innermost one's policy rules. What cannot be remedied is raised again as it was, with the
diagnosis in its notes.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.core.log import get_plain_logger
from oomguard.core.partial_results import Partial
from oomguard.core.process_state import disabled
from oomguard.engines.protocol import SizeOfCall
from oomguard.engines.registry import guarded_remotely
from oomguard.guarding import intercept as state
from oomguard.guarding import observers as told
from oomguard.guarding.batch_size_cache import KnownSizes
from oomguard.guarding.call_metrics import report_attempt, report_death, report_end_of_call
from oomguard.guarding.failure import run_guarded, snapshot_path, take_at
from oomguard.guarding.function_call import AsHandedIn, RowsCall
from oomguard.guarding.intercept import entered, in_force, watch, watching
from oomguard.guarding.micro_batch import in_parts
from oomguard.guarding.observers import attempted
from oomguard.guarding.wrap import enter_around, is_special
from oomguard.probe.snapshot_recorder import Recording
from oomguard.remedy.policy import Policy, make_policy
from oomguard.scan.exceptions import may_be_oom

# The guard as a decorator: of a function that calls engines, and of one that works on rows itself.

# The modules, not what is in them: a decorated function that is sent to another process (Ray's, by
# cloudpickle) finds them there.


F = TypeVar("F", bound=Callable[..., Any])


def decorate(made: Guard, function: F) -> F:
    """Return the function under a guard of ``made``'s policy; raises UsageError for what is no
    function.

    Of what is called elsewhere (Ray's remote functions, classes of actors) the code is guarded,
    where it runs.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return cast("F", type(function)(decorate(made, function.__func__)))
    if not isinstance(function, (types.FunctionType, types.MethodType, type)):
        remote = guarded_remotely(function, functools.partial(_of_remote, made))
        if remote is not None:
            return cast("F", remote)
    if isinstance(function, type) or not callable(function):
        if isinstance(function, type):
            what = f"the class {function.__name__}"
        else:
            what = repr(function)
        hint = "guard a function or a method, or a block: with oomguard.guard(): ..."
        if isinstance(function, type) and "ray" in sys.modules:
            hint += "; the guard of an actor's class stands above @ray.remote"
        raise UsageError(f"guard expects a function, not {what}", hint=hint)
    current = made.for_function()
    decorated = _around(current, function)
    current.shows_on(decorated)
    return decorated


def _of_remote(made: Guard, function: F, *, is_method: bool = False) -> F:
    """Return the code of what is called elsewhere, guarded; a method without the arguments to split
    is guarded as it is.
    """
    is_whole = is_method and (
        is_special(function) or not set(made.batch) <= set(inspect.signature(function).parameters)
    )
    return decorate(made.for_function(batch=()) if is_whole else made, function)


def _as_watched(function: F) -> F:
    """Return an engine's method that was taken from its object before it was watched
    (``guard(model.generate)``) as it is now.
    """
    if isinstance(function, functools.partial):
        inner = _as_watched(function.func)
        return cast("F", functools.partial(inner, *function.args, **function.keywords))
    if not isinstance(function, types.MethodType):
        return function
    if not state.watching:
        state.watch()
    now = getattr(function.__self__, function.__name__, function)
    was = getattr(now, "__wrapped__", None)
    if was is function.__func__:
        return cast("F", now)
    return function


def _around(current: Guard, function: F) -> F:
    function = _as_watched(function)
    if not current.batch:
        return enter_around(function, current) or _guarding(current, function)
    for name in current.batch:
        if name not in inspect.signature(function).parameters:
            raise SettingError(f"{function.__qualname__} has no argument {name!r} to split")
    if is_special(function):
        if inspect.isgeneratorfunction(function):
            what = "a generator"
        else:
            what = "async"
        hint = (
            "without batch= the engine calls in it are split; or guard the plain function that it "
            "calls, with batch="
        )
        raise SettingError(
            f"{function.__qualname__} is {what} and cannot be split, as batch= splits plain "
            f"functions: {hint}"
        )
    return _splitting(current, function)


def _guarding(current: Guard, function: F) -> F:
    """Return the plain function with ``current`` in force while it runs; keep a call that succeeds
    cheap.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not state.watching:
            state.watch()
        if current.recording is not None:
            current.begin_recording()
        if current.known.after_kill:
            current.known.after_kill.tell_as_it_was()
        token = state.entered.set((*state.entered.get(), current))
        state.in_force.append(None)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            current.explain(error)
            raise
        finally:
            state.in_force.pop()
            state.entered.reset(token)

    return cast("F", call)


def _splitting(current: Guard, function: F) -> F:
    """Return the plain function, run in parts by its arguments ``batch`` where a call of it runs
    out of memory.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if told.observing and told.looking_on():
            with told.ToldCall(
                function.__qualname__, "", lambda: _size(current, function, args, kwargs)
            ):
                return call(*args, **kwargs)
        if current.recording is not None:
            current.begin_recording()
        token = state.inside_call.set(True)
        handed_in = AsHandedIn(args, kwargs)
        try:
            if current.known and not disabled():
                result, error = _in_parts(current, function, args, kwargs, handed_in)
            else:
                result, error = run_guarded(function, args, kwargs)
                if error is not None and may_be_oom(error) and not disabled():
                    result, error = _in_parts(current, function, args, kwargs, handed_in, error)
        finally:
            state.inside_call.reset(token)
        try:
            if error is not None:
                current.explain(error)
                raise error
            return result
        finally:
            # a frame that names its own exception is a cycle, and the exception holds the frames
            # below
            del error

    return cast("F", call)


def _size(
    current: Guard, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SizeOfCall:
    return RowsCall.of(function, current.batch, args, kwargs).rows, None, None


def _in_parts(
    current: Guard,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handed_in: AsHandedIn,
    failed: BaseException | None = None,
) -> tuple[Any, BaseException | None]:
    """Return the result of a call, run in parts, and None, or None and the exception to raise.

    ``failed`` is the exception of the whole call, where it has been run already.
    """
    rows, unread = run_guarded(RowsCall.of, (function, current.batch, args, kwargs, handed_in), {})
    if unread is not None and failed is None:
        return run_guarded(
            function, args, kwargs
        )  # the function itself says what is wrong with its arguments
    if unread is None:
        return in_parts(current, function, rows, None if failed is None else [failed])
    assert failed is not None  # noqa: S101 - a call that could not be read has failed
    current.explain(failed)
    return None, failed


# A function under a guard, as type checkers see it: called as before, with what happened in its
# calls.

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")


class GuardedFunction(Protocol[P, R_co]):
    """A guarded function, or a method of a class.

    Attributes:
        attempts: the attempts of its last call that ran out of memory.
        diagnosis: what that call failed of; None if none has failed.
    """

    attempts: tuple[Attempt, ...]
    diagnosis: Diagnosis | None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function, under its guard."""

    @overload
    def __get__(self, instance: None, owner: Any) -> GuardedFunction[P, R_co]: ...
    @overload
    def __get__(
        self: GuardedFunction[Concatenate[S, Q], R], instance: S, owner: Any
    ) -> GuardedFunction[Q, R]: ...


# A guard that goes to another process with the function that it guards: what it permits and knows
# goes with it, what happened stays.

_HAPPENED = {"diagnosis": None, "partial": None}


def state_of(guard: Guard) -> dict[str, Any]:
    """Return what another process makes the guard of."""
    if guard.recording is None:
        path = None
    else:
        path = guard.recording.path
    happened: dict[str, Any] = {
        "_attempts": deque(maxlen=guard._attempts.maxlen),
        "reported": set(),
        **_HAPPENED,
    }
    state = {**vars(guard), **happened, "recording": path, "known": guard.known.learned()}
    del state["_lock"]
    return state


def restore(guard: Guard, state: dict[str, Any]) -> None:
    """Make the guard of what ``state_of`` returned, with what others of its job have
    learned since.
    """
    from oomguard.guarding.batch_size_cache import share
    from oomguard.guarding.kill_recovery import AfterKill

    vars(guard).update(state)
    guard._lock, guard.known = threading.Lock(), KnownSizes()
    if state["recording"] is None:
        guard.recording = None
    else:
        guard.recording = Recording(state["recording"])
    guard.known.take(state["known"])
    guard.known.after_kill = AfterKill(state["_name"], guard.policy)
    share(state["_name"], guard.known)


R = TypeVar("R")
EffectName = Literal["output-preserving", "reduces-capacity", "changes-outputs"]
DEFAULT_MAX_ATTEMPTS: Final = 8
# A guard around a loop of days keeps no more than these.
MAX_ATTEMPTS_KEPT: Final = 1000


class Guard:
    """One guard; make it with ``oomguard.guard``.

    Attributes:
        policy: what it permits.
        batch: the arguments along which a decorated function is split; empty: it is not.
        restart: whether an engine that dies at work of anything but memory is made again.
        start_within_s: the seconds in which an engine must have started; None: it may take any
            number.
        attempts: the last 1,000 attempts under ``with``, over all calls in it but those that
            succeeded at once, as they were made. A decorated function's are on the function: those
            of the last call that ran out of memory.
        diagnosis: the last failure; None: there was none. A decorated function's is on the
            function.
        recording: what takes a memory snapshot at the first failure; None: none is asked for.
        partial: the rows that are done of the last call under ``with``, where it was given up; None
            otherwise.
        known: the sizes that ran in earlier calls, with which later ones begin.
        reported: the kinds of calls of which a warning said that they go on in parts.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        batch: str | Collection[str] | None = None,
        restart: bool = False,
        start_within_s: float | None = None,
        snapshot: Path | None = None,
        on_incident: Callable[[Incident], object] | None = None,
        on_patch: Callable[[Patch], object] | None = None,
    ) -> None:
        self.policy = policy
        self.restart = restart
        self.start_within_s = start_within_s
        self.batch: tuple[str, ...] = (batch,) if isinstance(batch, str) else tuple(batch or ())
        self._attempts: deque[Attempt] = deque(maxlen=MAX_ATTEMPTS_KEPT)
        self.reported: set[tuple[str, int]] = set()
        self.diagnosis: Diagnosis | None = None
        self.partial: Partial | None = None
        self.known = KnownSizes()
        if snapshot is None:
            self.recording = None
        else:
            self.recording = Recording(snapshot)
        self._on_incident = on_incident
        self._on_patch = on_patch
        self._function: Any = None
        self._name = ""
        self._lock = threading.Lock()

    def __enter__(self) -> Guard:
        if not watching:
            watch()
        if self.recording is not None and not disabled():
            self.recording.begin()
        entered.set((*entered.get(), self))
        in_force.append(None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        in_force.pop()
        guards = list(entered.get())
        if self in guards:
            del guards[len(guards) - 1 - guards[::-1].index(self)]
            entered.set(tuple(guards))
        if error is not None:
            self.explain(error)
        if self.recording is not None and self.recording.is_on:
            self.recording.end()

    async def __aenter__(self) -> Guard:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> GuardedFunction[P, R]:
        """Guard a function: sync, async, generator or async generator, also a method."""
        return cast("GuardedFunction[P, R]", decorate(self, function))

    def explain(self, error: BaseException) -> None:
        """Add the diagnosis to an exception that leaves the guard, once, and only where it is a
        memory failure.
        """
        if not may_be_oom(error) or disabled():
            return
        if "__oomguard__" in vars(error):
            from oomguard.guarding.advice import note_if_taken_earlier

            note_if_taken_earlier(error)
            return
        self.failing(error)
        try:
            from oomguard.guarding.advice import explained

            diagnosis = explained(
                error,
                self.policy,
                self.attempts if self._function is None else self._function.attempts,
            )
        except Exception:
            logger = get_plain_logger()
            logger.exception("the diagnosis failed")
            return
        if diagnosis is not None:
            self._keep(diagnosis)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts that are kept, in order."""
        return tuple(self._attempts)

    @property
    def snapshot(self) -> Path | None:
        """The file of the memory snapshot that was taken in this process; None: none was."""
        if self.recording is None:
            return None
        return self.recording.taken

    def for_function(self, batch: tuple[str, ...] | None = None) -> Guard:
        """Return a guard of the same policy for all calls of one decorated function; ``batch``
        None: split as this one says.
        """
        return Guard(
            self.policy,
            batch=self.batch if batch is None else batch,
            restart=self.restart,
            start_within_s=self.start_within_s,
            snapshot=None if self.recording is None else self.recording.path,
            on_incident=self._on_incident,
            on_patch=self._on_patch,
        )

    def begin_recording(self) -> None:
        """Record for a memory snapshot from a decorated function's first call on, where one is
        asked for.
        """
        if self.recording is not None and not self.recording.is_on and not disabled():
            self.recording.begin()

    def failing(self, error: BaseException) -> None:
        """Take the memory snapshot, where one is asked for."""
        take_at(error, self.recording)

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self, state)

    def shows_on(self, function: Any) -> None:
        """Show on a decorated function what happened in its calls, as ``attempts`` and
        ``diagnosis``.
        """
        self._function = function
        self._name = f"{function.__module__}.{function.__qualname__}"
        function.attempts = ()
        function.diagnosis = None

    def _keep(self, diagnosis: Diagnosis) -> None:
        if self._function is None:
            self.diagnosis = diagnosis
        else:
            self._function.diagnosis = diagnosis

    def record(self, attempt: Attempt, *, is_healthy: bool = False) -> None:
        """Add an attempt, unless its call succeeded at once, as it was made; several threads may do
        so at once.
        """
        attempted(attempt)
        report_attempt(attempt)
        if self._function is None and not is_healthy:
            with self._lock:
                self._attempts.append(attempt)

    def forget_attempts(self) -> None:
        """Drop the attempts that are kept."""
        self._attempts.clear()

    def replace(self, attempt: Attempt, now: Attempt) -> None:
        """Put an attempt in the place of one that ended well and has failed since."""
        report_death(attempt, now)
        with self._lock:
            kept = [now if one is attempt else one for one in self._attempts]
            self._attempts = deque(kept, maxlen=MAX_ATTEMPTS_KEPT)

    def ended(self, attempts: tuple[Attempt, ...], partial: Partial | None) -> None:
        """Keep what is left of a call: under ``with`` its finished rows, of a function its
        attempts, where it failed at first.
        """
        report_end_of_call()
        if self._function is None:
            self.partial = partial
        elif attempts:
            self._function.attempts = attempts

    def incident(self, diagnosis: Diagnosis) -> None:
        """Keep a diagnosis, and tell the callback."""
        self._keep(diagnosis)
        if self._on_incident is not None and diagnosis.first_cause is not None:
            _tell(self._on_incident, diagnosis.first_cause)

    def patched(self, patch: Patch) -> None:
        """Tell the callback of a patch before it is applied."""
        if self._on_patch is not None:
            _tell(self._on_patch, patch)


@overload
def guard(function: Callable[P, R], /) -> GuardedFunction[P, R]: ...
@overload
def guard(
    function: None = None,
    /,
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    pin: Collection[str] = (),
    batch: str | Collection[str] | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    restart: bool = False,
    start_within_s: float | None = None,
    snapshot: str | Path | None = None,
    on_incident: Callable[[Incident], object] | None = None,
    on_patch: Callable[[Patch], object] | None = None,
) -> Guard: ...
def guard(
    function: Callable[..., Any] | None = None,
    /,
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    pin: Collection[str] = (),
    batch: str | Collection[str] | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    restart: bool = False,
    start_within_s: float | None = None,
    snapshot: str | Path | None = None,
    on_incident: Callable[[Incident], object] | None = None,
    on_patch: Callable[[Patch], object] | None = None,
) -> Any:
    """Guard a function (``@guard``, ``@guard(...)``) or a block (``with guard() as g``) against
    running out of memory.

    Engine calls inside (``generate`` of transformers) are diagnosed when they fail for memory,
    changed by the least that fits, and run again; completed rows are kept and the order of results
    never changes.

    Args:
        allow: highest effect a patch may have; None: output-preserving, and reduces-capacity on
            what you left alone.
        floors: never go below these values, by setting.
        pin: settings that are never touched.
        batch: the argument of a decorated function to split by rows, a list, tensor, array, table
            or a dict of them (a batch of columns), or all of them where rows have several
            (``("texts", "labels")``); its result must be one of these too.
        max_attempts: runs of one call, the first included.
        restart: whether an engine that dies at work is made again as it was where memory was not
            the cause. For memory it is made again with the least that fits, whatever this says.
        snapshot: the file for torch's memory snapshot at the first allocation that fails, taken
            before anything is freed; torch records from CUDA's first use on. No file is
            overwritten: NAME-1 is next. Where it cannot be taken, a line says so.
        start_within_s: the seconds in which vLLM must have started; one that has not is ended, and
            raises what vLLM raises where its processes died. None: it may take any number.
        on_incident: called with each incident, diagnosed and planned for.
        on_patch: called with each patch before it is applied.

    Raises:
        SettingError: an unknown effect, setting or argument to split, not a time, or a snapshot in
            no folder.
        UsageError: what is guarded is no function (a class, a number).

    What the guarded code raises comes out unchanged, with the diagnosis in its notes where it is a
    memory failure.
    """
    if start_within_s is not None and not start_within_s > 0:
        raise SettingError(
            f"start_within_s={start_within_s!r}", hint="a number of seconds above 0, or None"
        )
    path = snapshot_path(snapshot)
    policy = make_policy(allow, pin, floors, max_relaunches=max_attempts - 1)
    made = Guard(
        policy,
        batch=batch,
        restart=restart,
        start_within_s=start_within_s,
        snapshot=path,
        on_incident=on_incident,
        on_patch=on_patch,
    )
    if function is None:
        return made
    return made(function)


def _tell(callback: Callable[[Any], object], record: Incident | Patch) -> None:
    """Call a user's callback and log what it raises, which must not take the place of
    the failure.
    """
    try:
        callback(record)
    except Exception:
        logger = get_plain_logger()
        logger.exception("a callback failed")
