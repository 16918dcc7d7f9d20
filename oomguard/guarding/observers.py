"""Report watched calls, and the attempts in them, to observers and to telemetry.

Neither changes anything. Context variables hold the observers, so other threads and tasks are not
affected.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast

from oomguard.core.errors import Partial
from oomguard.core.incident import Attempt, Diagnosis, Patch
from oomguard.core.installation import extension
from oomguard.core.log import get_plain_logger
from oomguard.engines.protocol import SizeOfCall
from oomguard.guarding.batch_size_cache import BatchSizeCache
from oomguard.remedy.policy import Policy


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
        began = [without_mistake(begin) for begin in self._begins]
        self._calls = tuple(call for call in began if call is not None)
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
        with contextlib.suppress(Exception):  # the call itself will reject such arguments
            call_size = size()
        self._block = ObservedBlock(
            *(
                functools.partial(observer.began, what, model, call_size)
                for observer in looking_on()
            )
        )

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
