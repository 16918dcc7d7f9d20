"""The guard: a decorator and a context manager that watch engine calls and remedy them one by one.

A context variable holds the guard in force, so threads and tasks outside it see nothing, and guards nest: the
innermost one's policy rules. What cannot be remedied is raised again as it was, with the diagnosis in its notes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Literal, TypeVar, overload

from oomguard.decorating import enter_around, is_special
from oomguard.diagnosing import assess_all, default_rules
from oomguard.engines import transformers as hf
from oomguard.engines.rows import RowsCall
from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.observe.exceptions import may_be_oom
from oomguard.remedy.policy import Policy, make_policy
from oomguard.splitting import SplitRun, annotate, scan_error
from oomguard.switch import disabled

F = TypeVar("F", bound=Callable[..., Any])
EffectName = Literal["output-preserving", "reduces-capacity", "changes-outputs"]
DEFAULT_MAX_ATTEMPTS: Final = 8

FailedCall = tuple[BaseException, hf.GenerateCall]
# The guards that are entered in this thread or task, innermost last.
_entered: ContextVar[tuple[Guard, ...]] = ContextVar("oomguard_guards", default=())
_inside_call: ContextVar[bool] = ContextVar("oomguard_inside_call", default=False)
# Where blocks that are no guard want to know of the call of ``generate`` that failed in them, innermost last.
_failed_calls: ContextVar[tuple[list[FailedCall], ...]] = ContextVar("oomguard_failed_calls", default=())


class Guard:
    """One guard; make it with ``oomguard.guard``. ``attempts`` and ``diagnosis`` say what happened under it."""

    def __init__(
        self,
        policy: Policy,
        *,
        batch: str | None = None,
        on_incident: Callable[[Incident], object] | None = None,
        on_patch: Callable[[Patch], object] | None = None,
    ) -> None:
        self.policy = policy
        self.batch = batch
        self.attempts: tuple[Attempt, ...] = ()
        self.diagnosis: Diagnosis | None = None
        self._on_incident, self._on_patch = on_incident, on_patch
        self._lock = threading.Lock()

    def __enter__(self) -> Guard:
        if not disabled():
            hf.watch(_watched_generate)
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guards = list(_entered.get())
        if self in guards:
            del guards[len(guards) - 1 - guards[::-1].index(self)]
            _entered.set(tuple(guards))
        if error is not None and not disabled():
            self._explain(error)

    async def __aenter__(self) -> Guard:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Guard a function: sync, async, generator or async generator, also a method."""
        return _decorate(self, function)

    def _explain(self, error: BaseException) -> None:
        """Add the diagnosis to an exception that leaves the guard, once, and only where it is a memory failure."""
        if getattr(error, "__oomguard__", False) or not may_be_oom(error):
            return
        try:
            diagnosis = assess_all(scan_error(error), default_rules(), self.policy)
        except Exception:
            logging.getLogger("oomguard").exception("the diagnosis failed")
            return
        if diagnosis.first_cause is not None:
            self.diagnosis = diagnosis
            annotate(error, diagnosis.first_cause)

    def _fresh(self) -> Guard:
        """A guard of the same policy for one call of a decorated function."""
        return Guard(self.policy, batch=self.batch, on_incident=self._on_incident, on_patch=self._on_patch)

    def record(self, attempt: Attempt) -> None:
        """Add an attempt; several threads may do so at once."""
        with self._lock:
            self.attempts = (*self.attempts, attempt)

    def incident(self, diagnosis: Diagnosis) -> None:
        """Note a diagnosis, and tell the callback."""
        self.diagnosis = diagnosis
        if self._on_incident is not None and diagnosis.first_cause is not None:
            _tell(self._on_incident, diagnosis.first_cause)

    def patched(self, patch: Patch) -> None:
        """Tell the callback of a patch that is applied now."""
        if self._on_patch is not None:
            _tell(self._on_patch, patch)


@overload
def guard(function: F, /) -> F: ...
@overload
def guard(
    function: None = None,
    /,
    *,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    pin: Collection[str] = (),
    batch: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
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
    batch: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    on_incident: Callable[[Incident], object] | None = None,
    on_patch: Callable[[Patch], object] | None = None,
) -> Any:
    """Guard a function (``@guard``, ``@guard(...)``) or a block (``with guard() as g``) against running out of memory.

    Engine calls inside (``generate`` of transformers) are diagnosed when they fail for memory, changed by the least
    that fits, and run again; completed rows are kept and the order of results never changes.

    Args:
        allow: highest effect a patch may have; None: output-preserving, and reduces-capacity on what you left alone.
        floors: never go below these values, by setting.
        pin: settings that are never touched.
        batch: the argument of a decorated function to split by rows, a list or tensor; its result must be one too.
        max_attempts: runs of one call, the first included.
        on_incident: called with each incident, diagnosed and planned for.
        on_patch: called with each patch before it is applied.

    Raises SettingError for an unknown setting. What the guarded code raises is raised unchanged, with the diagnosis
    added to its notes where it is a memory failure.
    """
    policy = make_policy(allow, pin, floors, max_relaunches=max_attempts - 1)
    made = Guard(policy, batch=batch, on_incident=on_incident, on_patch=on_patch)
    return made if function is None else made(function)


def _tell(callback: Callable[[Any], object], record: Incident | Patch) -> None:
    """Call a user's callback; what it raises is logged, it must not take the place of the failure."""
    try:
        callback(record)
    except Exception:
        logging.getLogger("oomguard").exception("a callback failed")


def _watched_generate(wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What every ``generate`` goes through: itself, unless a guard is in force and no watched call is around it."""
    guards = _entered.get()
    if _inside_call.get() or disabled():
        return wrapped(*args, **kwargs)
    if not guards:
        failed = _failed_calls.get()
        if not failed:
            return wrapped(*args, **kwargs)
        try:
            return wrapped(*args, **kwargs)
        except Exception as raised:
            if may_be_oom(raised):
                with contextlib.suppress(
                    Exception
                ):  # only the last one counts, and it must not keep the others' inputs
                    failed[-1][:] = [(raised, hf.GenerateCall.of(model, args, kwargs))]
            raise
    result, error = _run_split(guards[-1], wrapped, hf.GenerateCall.of(model, args, kwargs))
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # a frame that names its own exception is a cycle, and the exception holds the frames below


@contextlib.contextmanager
def noting_failed_calls() -> Iterator[list[FailedCall]]:
    """The last call of ``generate`` that failed for memory inside, outside any guard, with its exception, which is raised as it is."""
    hf.watch(_watched_generate)
    failed: list[FailedCall] = []
    _failed_calls.set((*_failed_calls.get(), failed))
    try:
        yield failed
    finally:  # no token: a generator may be resumed in another context
        _failed_calls.set(tuple(other for other in _failed_calls.get() if other is not failed))


def _run_split(owner: Guard, function: Callable[..., Any], call: Any) -> tuple[Any, BaseException | None]:
    """The result or the exception to raise: the caller raises it, so that as few of our frames as can be stand above."""
    token = _inside_call.set(True)
    try:
        return SplitRun(owner, function, call).run()
    finally:
        _inside_call.reset(token)


def _decorate(made: Guard, function: F) -> F:
    if made.batch is None:
        entered = enter_around(function, made._fresh)
        if entered is not None:
            return entered
    elif made.batch not in inspect.signature(function).parameters:
        raise SettingError(f"{function.__qualname__} has no argument {made.batch!r} to split")
    elif is_special(function):
        raise SettingError(f"{function.__qualname__} cannot be split: only a plain function's result is put together")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with made._fresh() as current:
            if current.batch is None or disabled():
                return function(*args, **kwargs)
            result, error = _run_split(current, function, RowsCall.of(function, current.batch, args, kwargs))
            try:
                if error is not None:
                    raise error
                return result
            finally:
                del error

    return call  # type: ignore[return-value]
