"""Provide the guard: a decorator and context manager against running out of memory.

A context variable holds the active guards, so other threads and tasks are not affected. Guards
nest, and the innermost one's policy applies. If there is no remedy, the original exception is
raised with the diagnosis in its notes.
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
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

from oomguard.core.errors import Partial, SettingError, UsageError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.core.log import get_plain_logger
from oomguard.core.process import disabled
from oomguard.engines.registry import guarded_remotely
from oomguard.guarding import intercept as state
from oomguard.guarding.batch_size_cache import BatchSizeCache
from oomguard.guarding.failure import is_memory_failure, run_guarded, snapshot_path, take_at
from oomguard.guarding.intercept import (
    attempted,
    enter_around,
    entered,
    in_force,
    is_special,
    report_attempt,
    report_death,
    report_end_of_call,
    watch,
    watching,
)
from oomguard.remedy.policy import Policy, make_policy

if TYPE_CHECKING:
    from oomguard.core.errors import Partial
    from oomguard.engines.protocol import SizeOfCall
    from oomguard.guarding.function_call import OriginalInputs
    from oomguard.probe.snapshot_recorder import SnapshotRecorder

# Decorated functions refer to modules instead of their contents, so that cloudpickle (Ray) finds
# them in another process.


F = TypeVar("F", bound=Callable[..., Any])


def decorate(made: GuardState, function: F) -> F:
    """Return the function under a guard with ``made``'s policy.

    A remote function or an actor class (Ray) is guarded in the process that runs its code.

    Raises:
        UsageError: ``function`` is not a function.
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
        hint = "guard a function, a method, or a block: with oomguard.guard(): ..."
        if isinstance(function, type) and "ray" in sys.modules:
            hint += "; for an actor class, put the guard above @ray.remote"
        raise UsageError(f"guard expects a function, not {what}", hint=hint)
    current = made.for_function()
    decorated = _around(current, function)
    current.shows_on(decorated)
    return decorated


def _of_remote(made: GuardState, function: F, *, is_method: bool = False) -> F:
    """Return a remote function's code, guarded; methods without batch arguments stay whole."""
    is_whole = is_method and (
        is_special(function) or not set(made.batch) <= set(inspect.signature(function).parameters)
    )
    return decorate(made.for_function(batch=()) if is_whole else made, function)


def _as_watched(function: F) -> F:
    """Return the watched form of an engine's method that was taken earlier."""
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


def _around(current: GuardState, function: F) -> F:
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
            "without batch=, oomguard splits the engine calls in it; or guard the plain function "
            "that it calls, with batch="
        )
        raise SettingError(
            f"{function.__qualname__} is {what} and cannot be split; batch= splits only plain "
            f"functions: {hint}"
        )
    return _splitting(current, function)


def _guarding(current: GuardState, function: F) -> F:
    """Return the plain function with ``current`` active while it runs; a success costs little."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not state.watching:
            state.watch()
        if current.recording is not None:
            current.begin_recording()
        if current.known.after_kill:
            current.known.after_kill.log_unchanged()
        token = state.entered.set((*state.entered.get(), current))
        state.in_force.append(None)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            current.explain(error)
            if is_memory_failure(error) and not disabled():
                from oomguard.guarding.advice import note_row_arguments

                note_row_arguments(error, function, args, kwargs)
            raise
        finally:
            state.in_force.pop()
            state.entered.reset(token)

    return cast("F", call)


def _splitting(current: GuardState, function: F) -> F:
    """Return the plain function, which runs in parts along ``batch`` after an out-of-memory."""

    from oomguard.guarding import concurrency
    from oomguard.guarding.function_call import OriginalInputs

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if state.observing and state.looking_on():
            with state.ObservedCall(
                function.__qualname__, "", lambda: _size(current, function, args, kwargs)
            ):
                return call(*args, **kwargs)
        if current.recording is not None:
            current.begin_recording()
        token = state.inside_call.set(True)
        handed_in = OriginalInputs(args, kwargs)
        is_outer = concurrency.begin(None)
        try:
            if current.known and not disabled():
                result, error = _run_in_parts(current, function, args, kwargs, handed_in)
            else:
                result, error = run_guarded(function, args, kwargs)
                if error is not None and is_memory_failure(error) and not disabled():
                    result, error = _run_in_parts(current, function, args, kwargs, handed_in, error)
        finally:
            if is_outer:
                concurrency.end()
            state.inside_call.reset(token)
        try:
            if error is not None:
                current.explain(error)
                raise error
            return result
        finally:
            # A local that names its own exception is a cycle, which would keep the frames alive.
            del error

    return cast("F", call)


def _size(
    current: GuardState, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> SizeOfCall:
    from oomguard.guarding.function_call import RowsCall

    return RowsCall.of(function, current.batch, args, kwargs).rows, None, None


def _run_in_parts(
    current: GuardState,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handed_in: OriginalInputs,
    failed: BaseException | None = None,
) -> tuple[Any, BaseException | None]:
    """Return the result of a call in parts and None, or None and the exception to raise.

    ``failed`` is the exception of the whole call; None: it has not run.
    """
    from oomguard.guarding.function_call import RowsCall
    from oomguard.guarding.micro_batch import in_parts

    rows, unread = run_guarded(RowsCall.of, (function, current.batch, args, kwargs, handed_in), {})
    if unread is not None and failed is None:
        # The function itself reports what is wrong with its arguments.
        return run_guarded(function, args, kwargs)
    if unread is None:
        return in_parts(current, function, rows, None if failed is None else [failed])
    assert failed is not None  # noqa: S101 - a call that could not be read has failed
    current.explain(failed)
    return None, failed


# The type of a guarded function: the call stays the same, and its last failure is added.
P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")


class GuardedFunction(Protocol[P, R_co]):
    """A guarded function, or a method of a class.

    Attributes:
        attempts: the attempts of its last call that ran out of memory.
        diagnosis: the diagnosis of that call; None if none has failed.
    """

    attempts: tuple[Attempt, ...]
    diagnosis: Diagnosis | None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function under its guard."""

    @overload
    def __get__(self, instance: None, owner: Any) -> GuardedFunction[P, R_co]: ...
    @overload
    def __get__(
        self: GuardedFunction[Concatenate[S, Q], R], instance: S, owner: Any
    ) -> GuardedFunction[Q, R]: ...


# A pickled guard keeps its policy and what it learned, but not what happened.

_HAPPENED = {"diagnosis": None, "partial": None}


def pickled_state(guard: GuardState) -> dict[str, Any]:
    """Return the state with which another process makes the same guard."""
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
    # Python cannot pickle a lock.
    del state["_lock"]
    return state


def restore(guard: GuardState, state: dict[str, Any]) -> None:
    """Restore a guard from ``pickled_state``, with what its job's processes have learned since."""
    from oomguard.guarding.batch_size_cache import KillRecovery, share
    from oomguard.probe.snapshot_recorder import SnapshotRecorder

    vars(guard).update(state)
    guard._lock, guard.known = threading.Lock(), BatchSizeCache()
    if state["recording"] is None:
        guard.recording = None
    else:
        guard.recording = SnapshotRecorder(state["recording"])
    guard.known.take(state["known"])
    guard.known.after_kill = KillRecovery(state["_name"], guard.policy)
    share(state["_name"], guard.known)


R = TypeVar("R")
EffectName = Literal["output-preserving", "reduces-capacity", "changes-outputs"]
DEFAULT_MAX_ATTEMPTS: Final = 8
# A guard around a loop of days keeps at most so many attempts.
MAX_ATTEMPTS_KEPT: Final = 1000


class GuardState:
    """Hold what a guard may do, what it has learned, and what happened under it.

    Attributes:
        policy: what the user permits.
        batch: the arguments along which a decorated function is split; empty: it is not split.
        restart: whether an engine is restarted after a crash that is not an out-of-memory.
        start_within_s: the seconds in which an engine must start; None: no limit.
        attempts: the last 1,000 attempts under ``with``, without calls that succeeded at once.
        Those
            of a decorated function are attributes of the function.
        diagnosis: the last failure; None without one. That of a decorated function is an attribute
            of the function.
        recording: the memory snapshot's recorder; None: no snapshot was requested.
        partial: the finished rows of the last call under ``with``, if it was given up; otherwise
            None.
        known: the batch sizes that worked in earlier calls; later calls begin with them.
        reported: the kinds of calls for which a warning about splitting was logged.
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
        self.known = BatchSizeCache()
        self.recording: SnapshotRecorder | None = None
        if snapshot is not None:
            from oomguard.probe.snapshot_recorder import SnapshotRecorder

            self.recording = SnapshotRecorder(snapshot)
        self._on_incident = on_incident
        self._on_patch = on_patch
        self._function: Any = None
        self._name = ""
        self._lock = threading.Lock()

    def __enter__(self) -> GuardState:
        # The first guard installs the watch, so importing oomguard changes no engine.
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
        # A guard may be entered several times, so only its innermost entry goes.
        if self in guards:
            del guards[len(guards) - 1 - guards[::-1].index(self)]
            entered.set(tuple(guards))
        if error is not None:
            self.explain(error)
        if self.recording is not None and self.recording.is_on:
            self.recording.end()

    def explain(self, error: BaseException) -> None:
        """Add the diagnosis to a memory failure that leaves the guard, once."""
        if not is_memory_failure(error) or disabled():
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
        # A bug in oomguard must not replace the user's failure.
        except Exception:
            logger = get_plain_logger()
            logger.exception("the diagnosis failed")
            return
        if diagnosis is not None:
            self._keep(diagnosis)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The recorded attempts, in order."""
        return tuple(self._attempts)

    @property
    def snapshot(self) -> Path | None:
        """The file of the memory snapshot from this process; None without one."""
        if self.recording is None:
            return None
        return self.recording.taken

    def for_function(self, batch: tuple[str, ...] | None = None) -> GuardState:
        """Return a guard with the same policy for the calls of one decorated function.

        ``batch`` None: split along the same arguments.
        """
        return GuardState(
            self.policy,
            batch=self.batch if batch is None else batch,
            restart=self.restart,
            start_within_s=self.start_within_s,
            snapshot=None if self.recording is None else self.recording.path,
            on_incident=self._on_incident,
            on_patch=self._on_patch,
        )

    def begin_recording(self) -> None:
        """Record for a requested memory snapshot from a decorated function's first call."""
        if self.recording is not None and not self.recording.is_on and not disabled():
            self.recording.begin()

    def failing(self, error: BaseException) -> None:
        """Take the memory snapshot, if one is requested."""
        take_at(error, self.recording)

    def __getstate__(self) -> dict[str, Any]:
        return pickled_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self, state)

    def shows_on(self, function: Any) -> None:
        """Make ``attempts`` and ``diagnosis`` attributes of a decorated function."""
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
        """Add an attempt, unless its call succeeded at once; several threads may do so."""

        attempted(attempt)
        report_attempt(attempt)
        if self._function is None and not is_healthy:
            with self._lock:
                self._attempts.append(attempt)

    def forget_attempts(self) -> None:
        """Drop the recorded attempts."""
        self._attempts.clear()

    def replace(self, attempt: Attempt, now: Attempt) -> None:
        """Replace an attempt that succeeded but has failed since."""
        report_death(attempt, now)
        with self._lock:
            kept = [now if one is attempt else one for one in self._attempts]
            self._attempts = deque(kept, maxlen=MAX_ATTEMPTS_KEPT)

    def ended(self, attempts: tuple[Attempt, ...], partial: Partial | None) -> None:
        """Record the end of a call: finished rows under ``with``, attempts for a function."""
        report_end_of_call()
        if self._function is None:
            self.partial = partial
        elif attempts:
            self._function.attempts = attempts

    def incident(self, diagnosis: Diagnosis) -> None:
        """Record a diagnosis, and call the user's callback."""
        self._keep(diagnosis)
        if self._on_incident is not None and diagnosis.first_cause is not None:
            _call_back(self._on_incident, diagnosis.first_cause)

    def patched(self, patch: Patch) -> None:
        """Call the user's callback with a patch before it is applied."""
        if self._on_patch is not None:
            _call_back(self._on_patch, patch)


class Guard:
    """Guard the calls of a block or of a function; make it with ``oomguard.guard``.

        with oomguard.guard() as g:
            outputs = model.generate(**inputs)
        print(g.diagnosis)

    Attributes:
        attempts: the last 1,000 attempts under ``with``, without calls that succeeded at once.
            Those of a decorated function are attributes of the function.
        diagnosis: the last failure; None without one. That of a decorated function is an attribute
            of the function.
        partial: the finished rows of the last call under ``with``, if it was given up; otherwise
            None.
    """

    def __init__(self, state: GuardState) -> None:
        self._state = state

    def __enter__(self) -> Guard:
        self._state.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._state.__exit__(kind, error, trace)

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
        return cast("GuardedFunction[P, R]", decorate(self._state, function))

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The recorded attempts, in order."""
        return self._state.attempts

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The last failure; None without one."""
        return self._state.diagnosis

    @property
    def partial(self) -> Partial | None:
        """The finished rows of the last call, if it was given up; otherwise None."""
        return self._state.partial

    @property
    def snapshot(self) -> Path | None:
        """The file of the memory snapshot that ``guard(snapshot=...)`` wrote; None without one."""
        return self._state.snapshot


def state_of(guard: Guard) -> GuardState:
    """Return the state of a guard, for the packages that run calls under it."""
    return guard._state


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
    """GuardState a function or a block against running out of memory.

        @oomguard.guard(allow="reduces-capacity")
        def answer(prompts):
            return model.generate(**tokenizer(prompts, return_tensors="pt"))

    Also ``@guard`` and ``with guard() as g``. If an engine call inside runs out of memory, oomguard
    diagnoses it, makes the least change that fits, and runs it again. It keeps finished rows, and
    never changes the order of results.

    Args:
        allow: the highest permitted effect; None: keep outputs the same; reduce capacity only for
            settings that you did not set.
        floors: the lowest permitted values by setting.
        pin: settings that are never changed.
        batch: the argument along which a decorated function is split into rows, or several
            (``("texts", "labels")``). Arguments and result may be a list, tensor, array, table, or
            a dict of them.
        max_attempts: the number of attempts for one call, with the first one.
        restart: also restart vLLM after a crash that is not an out-of-memory. After an
            out-of-memory it is always restarted, with reduced settings.
        snapshot: the file for torch's memory snapshot of the first failed allocation; None: no
            snapshot. Existing files are kept (NAME-1 is next). torch records from the first use of
            CUDA.
        start_within_s: the seconds in which vLLM must start; None: no limit. A slower start is
            stopped and raises vLLM's own exception.
        on_incident: called with each incident, after its diagnosis and plan; None: nothing.
        on_patch: called with each patch before it is applied; None: nothing.

    Returns:
        The guarded function, or the guard.

    Raises:
        SettingError: an effect, setting or argument is unknown, the time is not positive, or the
            snapshot's folder does not exist.
        UsageError: ``function`` is not a function but, say, a class.

    Exceptions of the guarded code stay unchanged; a memory failure has the diagnosis in its notes.
    """
    if start_within_s is not None and not start_within_s > 0:
        raise SettingError(
            f"start_within_s={start_within_s!r} is not a time",
            hint="Give a number of seconds above 0, or None.",
        )
    path = snapshot_path(snapshot)
    policy = make_policy(allow, pin, floors, max_attempts=max_attempts)
    events = GuardState(
        policy,
        batch=batch,
        restart=restart,
        start_within_s=start_within_s,
        snapshot=path,
        on_incident=on_incident,
        on_patch=on_patch,
    )
    made = Guard(events)
    if function is None:
        return made
    return made(function)


def _call_back(callback: Callable[[Any], object], record: Incident | Patch) -> None:
    """Call a user's callback, and log its exception, which must not replace the failure."""
    try:
        callback(record)
    except Exception:
        logger = get_plain_logger()
        logger.exception("a callback failed")
