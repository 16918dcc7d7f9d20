"""Intercept watched calls, and know which guards are active where they are called.

Context variables hold the guards, so other threads and tasks are not affected.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar, cast

from oomguard.core.incident import Attempt, Diagnosis, Patch
from oomguard.core.installation import extension
from oomguard.core.log import get_plain_logger
from oomguard.core.process import disabled
from oomguard.engines.protocol import (
    Handler,
    OverridingReader,
    ReadCall,
    SizeOfCall,
    size_of,
    with_recorded_state,
)
from oomguard.engines.registry import watch_calls
from oomguard.guarding.batch_size_cache import BatchSizeCache
from oomguard.guarding.failure import add_note, is_memory_failure, run_guarded
from oomguard.probe import torch_memory
from oomguard.remedy.policy import Policy

if TYPE_CHECKING:
    from oomguard.core.errors import Partial
    from oomguard.engines.protocol import ReadStart

# Observers and telemetry see watched calls, and the attempts in them, but change nothing.


class GuardEvents(Protocol):
    """The guard as its parts see it: policy, known batch sizes, and a sink for events."""

    policy: Policy
    known: BatchSizeCache
    restart: bool
    start_within_s: float | None
    reported: set[tuple[str, int]]

    def failing(self, error: BaseException) -> None:
        """Handle a failure before anything of it is freed."""

    def record(self, attempt: Attempt, *, is_healthy: bool = False) -> None:
        """Record an attempt that ended; ``is_healthy``: its call succeeded at once."""

    def replace(self, attempt: Attempt, now: Attempt) -> None:
        """Replace an attempt that succeeded but has failed since."""

    def incident(self, diagnosis: Diagnosis) -> None:
        """Record a diagnosed failure."""

    def patched(self, patch: Patch) -> None:
        """Record a change before it is made."""

    def ended(self, attempts: tuple[Attempt, ...], partial: Partial | None) -> None:
        """Record the end of a call: its attempts after a failure, or its finished rows."""


P = ParamSpec("P")
T = TypeVar("T")
NO_SIZE: Final[SizeOfCall] = (None, None, None)


class CallObserver(Protocol):
    """A call that an observer watches."""

    def attempted(self, attempt: Attempt) -> None:
        """Record an attempt of a guard that ended."""

    def ended(self, error: BaseException | None) -> None:
        """Record the end of the call, and its exception; None without one."""


class Observer(Protocol):
    """An object that watches calls."""

    def began(self, what: str, model: str, size: SizeOfCall) -> CallObserver:
        """Record the beginning of a call."""


observers: ContextVar[tuple[Observer, ...]] = ContextVar("oomguard_observers", default=())
# The observed calls that run here; None outside any.
observed_calls: ContextVar[tuple[CallObserver, ...] | None] = ContextVar(
    "oomguard_observed_calls", default=None
)
# One entry per observer in any thread. While it is empty, a call checks nothing else.
observing: Final[list[None]] = []


def looking_on() -> tuple[Observer, ...]:
    """Return the observers of a call that begins now; none inside another observed call."""
    if observed_calls.get() is not None:
        return ()
    return observers.get()


class ObservedBlock:
    """A block whose beginning and end are reported to observers.

    It is a class and not a generator because every watched call uses it, so it must be fast.
    """

    __slots__ = ("_begins", "_calls")

    def __init__(self, *begins: Callable[[], CallObserver]) -> None:
        self._begins = begins

    def __enter__(self) -> tuple[CallObserver, ...]:
        began = []
        for begin in self._begins:
            call = without_mistake(begin)
            if call is not None:
                began.append(call)
        self._calls = tuple(began)
        return self._calls

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for call in reversed(self._calls):
            without_mistake(call.ended, error)


class ObservedCall:
    """A call of an engine that is reported to observers; use it only if ``looking_on`` has some."""

    __slots__ = ("_block", "_token")

    def __init__(self, what: str, model: str, size: Callable[[], SizeOfCall]) -> None:
        call_size = NO_SIZE
        # The call itself will reject arguments that cannot be read.
        with contextlib.suppress(Exception):
            call_size = size()
        begins = []
        for observer in looking_on():
            begins.append(functools.partial(observer.began, what, model, call_size))
        self._block = ObservedBlock(*begins)

    def __enter__(self) -> None:
        self._token: Token[tuple[CallObserver, ...] | None] = observed_calls.set(
            self._block.__enter__()
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        observed_calls.reset(self._token)
        self._block.__exit__(kind, error, trace)


def shown(
    size: Callable[[tuple[Any, ...], Mapping[str, Any]], SizeOfCall],
    wrapped: Callable[..., Any],
    engine: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call unchanged, and report it to observers."""
    if not observing or not looking_on():
        return wrapped(*args, **kwargs)
    with ObservedCall(wrapped.__name__, type(engine).__name__, lambda: size(args, kwargs)):
        return wrapped(*args, **kwargs)


def attempted(attempt: Attempt) -> None:
    """Report an attempt in the present call to its observers."""
    for call in observed_calls.get() or ():
        without_mistake(call.attempted, attempt)


def without_mistake(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return an observer's result; log its exception, which must not affect the user's call."""
    try:
        return function(*args, **kwargs)
    except Exception:
        logger = get_plain_logger()
        logger.exception("the watch failed")
        return None


def size_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SizeOfCall:
    """Return the rows and tokens of a frequent call, from its first argument with a shape."""
    for value in (*args, *kwargs.values()):
        shape = getattr(value, "shape", ())
        if shape:
            return int(shape[0]), int(shape[1]) if len(shape) == 2 else None, None
    return NO_SIZE


# Failed calls go to the metrics and spans of ``telemetry``, if it is installed. A call that
# succeeds at once is not reported, so it loads nothing.


class CallMetrics(Protocol):
    """Counts the attempts of guarded calls, or makes spans of them."""

    def count_attempt(self, attempt: Attempt) -> None:
        """Count an attempt that ended."""

    def count_death(self, before: Attempt, now: Attempt) -> None:
        """Count the death of an engine that had started successfully."""

    def end_call(self) -> None:
        """Close the span of a call."""


class _NoCallMetrics:
    """Counts nothing: telemetry is not installed."""

    def count_attempt(self, attempt: Attempt) -> None:
        """Ignore an attempt."""

    def count_death(self, before: Attempt, now: Attempt) -> None:
        """Ignore the death of an engine."""

    def end_call(self) -> None:
        """Ignore the end of a call."""


@functools.cache
def _call_metrics() -> CallMetrics:
    module = extension("call_metrics")
    if module is None:
        return _NoCallMetrics()
    return cast("CallMetrics", module)


def report_attempt(attempt: Attempt) -> None:
    """Report an attempt that ended, unless it was the first of a call and succeeded."""
    if attempt.incident is None and attempt.number == 1:
        return
    _call_metrics().count_attempt(attempt)


def report_death(before: Attempt, now: Attempt) -> None:
    """Report the death of an engine; ``before`` is the attempt that started it successfully."""
    _call_metrics().count_death(before, now)


def report_end_of_call() -> None:
    """Report the end of a call; without a reported attempt there is no span to close."""
    if _call_metrics.cache_info().currsize:
        _call_metrics().end_call()


# A generator's code runs only between two steps of its caller, so its context is entered for each
# step. ``send``, ``throw`` and ``close`` reach the function as without a wrapper.


F = TypeVar("F", bound=Callable[..., Any])
Context = AbstractContextManager[Any]


def is_special(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function returns before its code has finished."""
    tests = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(test(function) for test in tests)


def enter_around(function: F, context: Context) -> F | None:
    """Return the function with ``context`` entered while it runs; None for a plain function.

    All calls enter the same context, some at the same time, so it must be reentrant.
    """
    if inspect.isasyncgenfunction(function):
        return cast("F", _async_generator(function, context))
    if inspect.iscoroutinefunction(function):
        return cast("F", _coroutine(function, context))
    if inspect.isgeneratorfunction(function):
        return cast("F", _generator(function, context))
    return None


def _coroutine(function: Callable[..., Any], context: Context) -> Any:
    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with context:
            return await function(*args, **kwargs)

    return coroutine


def _generator(function: Callable[..., Any], context: Context) -> Any:
    @functools.wraps(function)
    def generator(*args: Any, **kwargs: Any) -> Any:
        items = function(*args, **kwargs)
        step = items.send
        value = None
        try:
            while True:
                with context:
                    try:
                        item = step(value)
                    except StopIteration as end:
                        return end.value
                try:
                    value = yield item
                    step = items.send
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001
                    # The caller threw it into the generator, so the function handles it.
                    step = items.throw
                    value = error
        finally:
            items.close()

    return generator


def _async_generator(function: Callable[..., Any], context: Context) -> Any:
    @functools.wraps(function)
    async def async_generator(*args: Any, **kwargs: Any) -> Any:
        items = function(*args, **kwargs)
        step = items.asend
        value = None
        try:
            while True:
                with context:
                    try:
                        item = await step(value)
                    except StopAsyncIteration:
                        return
                try:
                    value = yield item
                    step = items.asend
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001
                    # The caller threw it into the generator, so the function handles it.
                    step = items.athrow
                    value = error
        finally:
            await items.aclose()

    return async_generator


# The guards of this thread or task, innermost last.
entered: ContextVar[tuple[GuardEvents, ...]] = ContextVar("oomguard_guards", default=())
inside_call: ContextVar[bool] = ContextVar("oomguard_inside_call", default=False)
# One entry per active guard in any thread.
in_force: Final[list[None]] = []
_unguarded_threads: Final[list[str]] = []
_installing = threading.RLock()
# The handler of intercepted calls, once it is installed. A guarded call that succeeds checks
# nothing else.
watching: Final[list[Handler]] = []


def watch() -> None:
    """Intercept the engines' calls, once per process, unless oomguard is disabled.

    A thread that comes during the installation waits, because its calls would not be watched yet.
    """
    if watching or disabled():
        return
    with _installing:
        # Another thread may have installed it while this one waited for the lock.
        if not watching:
            from oomguard.engines.registry import watch_starts

            watch_calls(_watched, _watched_often, inside_call.get)
            watch_starts(_watched_start)
            watching.append(_watched)


def _renew_lock() -> None:
    """Replace the lock in a fork of this process, where no thread could release it."""
    global _installing  # noqa: PLW0603 - one lock for this process
    _installing = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _watched(
    read: ReadCall,
    wrapped: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a watched call; without a guard, or inside another watched call, run it unchanged."""
    if observing and looking_on():
        with ObservedCall(*_names(wrapped, model), lambda: size_of(read, model, args, kwargs)):
            return _watched(read, wrapped, model, args, kwargs)
    guards = entered.get()
    if inside_call.get() or disabled():
        return wrapped(*args, **kwargs)
    if not guards:
        if in_force and not _unguarded_threads:
            _warn_of_thread()
        return wrapped(*args, **kwargs)
    from oomguard.guarding import concurrency
    from oomguard.guarding.micro_batch import in_parts, may_split, read_or_none

    if isinstance(read, OverridingReader) and not may_split(
        read_or_none(read, model, args, kwargs)
    ):
        return wrapped(*args, **kwargs)
    # Calls inside this one are parts of it, so they are not watched on their own.
    token = inside_call.set(True)
    is_outer = concurrency.begin(model)
    try:
        if guards[-1].known and (call := read_or_none(read, model, args, kwargs)) is not None:
            result, error = in_parts(guards[-1], wrapped, call)
        else:
            result, error = _whole(guards[-1], read, wrapped, model, args, kwargs)
    finally:
        if is_outer:
            concurrency.end()
        inside_call.reset(token)
    try:
        if error is not None:
            raise error
        return result
    finally:
        # A local that names its own exception is a cycle, which would keep the frames below alive.
        del error


def _watched_start(
    read: ReadStart,
    wrapped: Callable[..., Any],
    _instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a watched start; without a guard, or inside another watched call, run it unchanged."""
    guards = entered.get()
    if not guards or inside_call.get() or disabled():
        return wrapped(*args, **kwargs)
    # Most guarded programs start no engine, so this module loads here.
    from oomguard.guarding.engine_start import run_of

    token = inside_call.set(True)
    try:
        run = run_of(guards[-1], read, wrapped, args, kwargs)
        if run is None:
            return wrapped(*args, **kwargs)
        result, error = run.run()
        if error is None:
            run.attend(result)
    finally:
        inside_call.reset(token)
    try:
        if error is not None:
            raise error
        return result
    finally:
        # A local that names its own exception is a cycle, which would keep the frames below alive.
        del error


def _whole(
    owner: GuardEvents,
    read: ReadCall,
    wrapped: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, BaseException | None]:
    """Run a call as the user made it, and in parts if that fails; a success costs little."""
    from oomguard.guarding.micro_batch import in_parts, read_or_none

    began_s = time.monotonic()
    with torch_memory.MemoryPeak() as peak:
        # A failed call may have changed its cache, so the state before it is recorded first.
        read, unread = run_guarded(with_recorded_state, (read, model, args, kwargs), {})
        result, error = run_guarded(wrapped, args, kwargs)
    if unread is not None or (error is not None and not is_memory_failure(error)):
        return result, error
    took_s = time.monotonic() - began_s
    if peak.bytes is None:
        measured = {}
    else:
        measured = {"peak_bytes": peak.bytes}
    call = read_or_none(read, model, args, kwargs)
    if call is None:
        return result, error
    if error is not None:
        # A local that names its own exception is a cycle, which would keep the frames alive.
        failed, error = [error], None
        return in_parts(owner, wrapped, call, failed, seconds=took_s, measured=measured)
    attempt = Attempt(1, {"batch_size": call.rows}, seconds=took_s, measured=measured)
    owner.record(attempt, is_healthy=True)
    return result, None


def _watched_often(
    read: ReadCall,
    wrapped: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a frequent call; it is read and recorded only after a failure under this guard."""
    # Every forward pass of a generation comes here, so this checks only whether a watch records it.
    if observing and observed_calls.get() is None and looking_on():
        with ObservedCall(*_names(wrapped, model), lambda: size_of_tensors(args, kwargs)):
            return _watched_often(read, wrapped, model, args, kwargs)
    guards = entered.get()
    if not guards and not in_force:
        # Every call outside a guard comes here, so it does nothing else.
        return wrapped(*args, **kwargs)
    if not guards or inside_call.get() or disabled():
        return _watched(read, wrapped, model, args, kwargs)
    from oomguard.guarding import concurrency

    token = inside_call.set(True)
    is_outer = concurrency.begin(model)
    try:
        result, error = _run_often(guards[-1], read, wrapped, (model, args, kwargs))
    finally:
        if is_outer:
            concurrency.end()
        inside_call.reset(token)
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error


def _run_often(
    owner: GuardEvents,
    read: ReadCall,
    wrapped: Callable[..., Any],
    given: tuple[Any, tuple[Any, ...], dict[str, Any]],
) -> tuple[Any, BaseException | None]:
    failed = None
    if not owner.known:
        result, failed = run_guarded(wrapped, given[1], given[2])
        if failed is None or not is_memory_failure(failed):
            return result, failed
    from oomguard.guarding.failure import WHY_NOT
    from oomguard.guarding.micro_batch import in_parts

    call, unread = run_guarded(read, given, {})
    if unread is not None or call.may_train:
        if failed is None:
            return run_guarded(wrapped, given[1], given[2])
        add_note(failed, f"oomguard: not run in parts: {WHY_NOT if unread is None else unread}")
        return None, failed
    given_up = [] if failed is None else [failed]
    failed = None
    return in_parts(owner, wrapped, call, given_up)


def _names(wrapped: Callable[..., Any], model: Any) -> tuple[str, str]:
    """Return the names of a call and its model for reports; calling a model is its forward."""
    return getattr(wrapped, "__name__", "forward"), type(model).__name__


def _warn_of_thread() -> None:
    """Warn once that a call runs in a thread without a guard, such as one of a pool."""
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        from oomguard.core.log import get_logger

        _unguarded_threads.append(thread.name)
        hint = "guard the function that the thread runs"
        get_logger().warning(
            "a call runs in a thread without a guard", thread=thread.name, hint=hint
        )
