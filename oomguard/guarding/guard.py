"""The guard: a decorator and a context manager that watch engine calls and remedy them one by one.

A context variable holds the guard in force, so threads and tasks outside it see nothing, and guards nest: the
innermost one's policy rules. What cannot be remedied is raised again as it was, with the diagnosis in its notes.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Final, Literal, TypeVar, cast, overload

from oomguard.diagnosing import assess_all, default_rules
from oomguard.errors import SettingError, UsageError
from oomguard.facts import FactValue
from oomguard.guarding.failure import annotate, scan_error
from oomguard.guarding.function_call import RowsCall
from oomguard.guarding.split import SplitRun, run_guarded
from oomguard.guarding.watching import entered, inside_call, watch, watching
from oomguard.guarding.wrap import enter_around, is_special
from oomguard.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.observe.exceptions import may_be_oom
from oomguard.remedy.policy import Policy, make_policy
from oomguard.switch import disabled

F = TypeVar("F", bound=Callable[..., Any])
EffectName = Literal["output-preserving", "reduces-capacity", "changes-outputs"]
DEFAULT_MAX_ATTEMPTS: Final = 8


class Guard:
    """One guard; make it with ``oomguard.guard``.

    Attributes:
        policy: what it permits.
        batch: the argument along which a decorated function is split; None: it is not.
        attempts: every attempt under ``with``, over all calls in it. The calls of a decorated function are not kept.
        diagnosis: the last failure under ``with``; None: there was none.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        batch: str | None = None,
        on_incident: Callable[[Incident], object] | None = None,
        on_patch: Callable[[Patch], object] | None = None,
        keeps: bool = True,
    ) -> None:
        self.policy = policy
        self.batch = batch
        self.attempts: tuple[Attempt, ...] = ()
        self.diagnosis: Diagnosis | None = None
        self._on_incident, self._on_patch = on_incident, on_patch
        self._keeps = keeps
        self._lock = threading.Lock()

    def __enter__(self) -> Guard:
        if not watching:
            watch()
        entered.set((*entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guards = list(entered.get())
        if self in guards:
            del guards[len(guards) - 1 - guards[::-1].index(self)]
            entered.set(tuple(guards))
        if error is not None:
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
        if getattr(error, "__oomguard__", False) or not may_be_oom(error) or disabled():
            return
        try:
            diagnosis = assess_all(scan_error(error), default_rules(), self.policy)
        except Exception:
            logging.getLogger("oomguard").exception("the diagnosis failed")
            return
        if diagnosis.first_cause is not None:
            self._keep(diagnosis)
            annotate(error, diagnosis.first_cause)

    def _for_calls(self) -> Guard:
        """Return a guard of the same policy for all calls of a decorated function; it keeps nothing of them."""
        return Guard(self.policy, batch=self.batch, on_incident=self._on_incident, on_patch=self._on_patch, keeps=False)

    def _keep(self, diagnosis: Diagnosis) -> None:
        if self._keeps:
            self.diagnosis = diagnosis

    def record(self, attempt: Attempt) -> None:
        """Add an attempt; several threads may do so at once."""
        if self._keeps:
            with self._lock:
                self.attempts = (*self.attempts, attempt)

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

    Raises:
        SettingError: an unknown effect, setting or argument to split.
        UsageError: what is guarded is no function (a class, a number).

    What the guarded code raises comes out unchanged, with the diagnosis in its notes where it is a memory failure.
    """
    policy = make_policy(allow, pin, floors, max_relaunches=max_attempts - 1)
    made = Guard(policy, batch=batch, on_incident=on_incident, on_patch=on_patch)
    return made if function is None else made(function)


def _tell(callback: Callable[[Any], object], record: Incident | Patch) -> None:
    """Call a user's callback and log what it raises, which must not take the place of the failure."""
    try:
        callback(record)
    except Exception:
        logging.getLogger("oomguard").exception("a callback failed")


def _decorate(made: Guard, function: F) -> F:
    if isinstance(function, type) or not callable(function):
        what = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
        hint = "guard a function or a method, or a block: with oomguard.guard(): ..."
        raise UsageError(f"guard expects a function, not {what}", hint=hint)
    current = made._for_calls()
    if made.batch is None:
        return enter_around(function, current) or _guarding(current, function)
    if made.batch not in inspect.signature(function).parameters:
        raise SettingError(f"{function.__qualname__} has no argument {made.batch!r} to split")
    if is_special(function):
        raise SettingError(f"{function.__qualname__} cannot be split: only a plain function's result is put together")
    return _splitting(current, made.batch, function)


def _guarding(current: Guard, function: F) -> F:
    """Return the plain function with ``current`` in force while it runs; keep a call that succeeds cheap."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not watching:
            watch()
        token = entered.set((*entered.get(), current))
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            current._explain(error)
            raise
        finally:
            entered.reset(token)

    return cast("F", call)


def _splitting(current: Guard, batch: str, function: F) -> F:
    """Return the plain function, run in parts by its argument ``batch`` where a call of it runs out of memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        token = inside_call.set(True)
        try:
            result, error = run_guarded(function, args, kwargs)
            if error is not None and may_be_oom(error) and not disabled():
                result, error = _in_parts(current, function, RowsCall.of(function, batch, args, kwargs), error)
        finally:
            inside_call.reset(token)
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # a frame that names its own exception is a cycle, and the exception holds the frames below

    return cast("F", call)


def _in_parts(
    current: Guard, function: Callable[..., Any], rows: RowsCall, failed: BaseException
) -> tuple[Any, BaseException | None]:
    """Return the result of a call that has ``failed``, run in parts, and None, or None and the exception to raise."""
    outcome, error = run_guarded(SplitRun(current, function, rows).run, (failed,), {})
    if error is None:
        ended: tuple[Any, BaseException | None] = outcome
        return ended
    current._explain(error)  # the parts ran, and did not fit into memory together
    return None, error
