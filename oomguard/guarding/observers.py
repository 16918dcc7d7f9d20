"""Report watched calls, and the attempts in them, to observers, which change nothing.

Context variables hold the observers, so other threads and tasks are not affected.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from oomguard.core.incident import Attempt, Diagnosis, Patch
from oomguard.core.log import get_plain_logger
from oomguard.core.partial_results import Partial
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
inside_told: ContextVar[tuple[CallObserver, ...] | None] = ContextVar(
    "oomguard_looked_on", default=None
)
# One entry per observer in any thread. While it is empty, a call checks nothing else.
observing: Final[list[None]] = []


def looking_on() -> tuple[Observer, ...]:
    """Return the observers of a call that begins now; none inside another observed call."""
    if inside_told.get() is not None:
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

    __slots__ = ("_token", "_told")

    def __init__(self, what: str, model: str, size: Callable[[], SizeOfCall]) -> None:
        call_size = NO_SIZE
        with contextlib.suppress(Exception):  # the call itself will reject such arguments
            call_size = size()
        self._told = ObservedBlock(
            *(
                functools.partial(observer.began, what, model, call_size)
                for observer in looking_on()
            )
        )

    def __enter__(self) -> None:
        self._token: Token[tuple[CallObserver, ...] | None] = inside_told.set(
            self._told.__enter__()
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        inside_told.reset(self._token)
        self._told.__exit__(kind, error, trace)


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
    for call in inside_told.get() or ():
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
