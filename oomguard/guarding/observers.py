"""Who looks on while watched calls run: told of each outermost call and of the attempts inside it,
and changes nothing.

Context variables hold them, so threads and tasks outside see nothing.
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
from oomguard.guarding.batch_size_cache import KnownSizes
from oomguard.remedy.policy import Policy

# The guard, as those see it that run and watch calls for it.


class Owner(Protocol):
    """Whose policy a call runs under, what it learned of earlier calls, and who is told of this
    one.
    """

    policy: Policy
    known: KnownSizes
    restart: bool
    start_within_s: float | None
    reported: set[tuple[str, int]]

    def failing(self, error: BaseException) -> None:
        """Take what is to be kept of a failure before anything of it is freed."""

    def record(self, attempt: Attempt, *, is_healthy: bool = False) -> None:
        """Take an attempt that ended; ``is_healthy``: of a call that succeeded at once, as it was
        made.
        """

    def replace(self, attempt: Attempt, now: Attempt) -> None:
        """Take an attempt that ended well and has failed since."""

    def incident(self, diagnosis: Diagnosis) -> None:
        """Take what is known of a failure."""

    def patched(self, patch: Patch) -> None:
        """Take a change before it is made."""

    def ended(self, attempts: tuple[Attempt, ...], partial: Partial | None) -> None:
        """Take a call's end: its attempts where it failed at first, and the rows that are done
        where it was given up.
        """


P = ParamSpec("P")
T = TypeVar("T")
NO_SIZE: Final[SizeOfCall] = (None, None, None)


class LookedOn(Protocol):
    """A call that runs while somebody looks on."""

    def attempted(self, attempt: Attempt) -> None:
        """Take an attempt of a guard that ended."""

    def ended(self, error: BaseException | None) -> None:
        """Take the call's end, and what it raised."""


class Observer(Protocol):
    """Who looks on."""

    def began(self, what: str, model: str, size: SizeOfCall) -> LookedOn:
        """Take the beginning of a call."""


observers: ContextVar[tuple[Observer, ...]] = ContextVar("oomguard_observers", default=())
# The calls that run here with those who look on told of them; None outside any.
inside_told: ContextVar[tuple[LookedOn, ...] | None] = ContextVar(
    "oomguard_looked_on", default=None
)
# One entry for each observer, whichever thread it is in: while it is empty a call asks for no more
# than this.
observing: Final[list[None]] = []


def looking_on() -> tuple[Observer, ...]:
    """Return who is to be told of a call that begins now: nobody inside another call."""
    if inside_told.get() is not None:
        return ()
    return observers.get()


class ObservedBlock:
    """A block, with those who look on told of its beginning, by ``begins``, and of its end.

    A class and no generator: every call that is watched goes through it.
    """

    __slots__ = ("_begins", "_calls")

    def __init__(self, *begins: Callable[[], LookedOn]) -> None:
        self._begins = begins

    def __enter__(self) -> tuple[LookedOn, ...]:
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


class ToldCall:
    """A call of an engine, told to those who look on; make it only where ``looking_on`` names
    somebody.
    """

    __slots__ = ("_token", "_told")

    def __init__(self, what: str, model: str, size: Callable[[], SizeOfCall]) -> None:
        told = NO_SIZE
        with contextlib.suppress(Exception):  # arguments that the call itself refuses
            told = size()
        self._told = ObservedBlock(
            *(functools.partial(observer.began, what, model, told) for observer in looking_on())
        )

    def __enter__(self) -> None:
        self._token: Token[tuple[LookedOn, ...] | None] = inside_told.set(self._told.__enter__())

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
    """Run a call that nothing is done about but to tell those who look on."""
    if not observing or not looking_on():
        return wrapped(*args, **kwargs)
    with ToldCall(wrapped.__name__, type(engine).__name__, lambda: size(args, kwargs)):
        return wrapped(*args, **kwargs)


def attempted(attempt: Attempt) -> None:
    """Tell those who look on of an attempt inside the call that runs here."""
    for call in inside_told.get() or ():
        without_mistake(call.attempted, attempt)


def without_mistake(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return what looking on gives; log what goes wrong in it: that never takes the place of what
    the user's call gives or raises.
    """
    try:
        return function(*args, **kwargs)
    except Exception:
        logger = get_plain_logger()
        logger.exception("the watch failed")
        return None


def size_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SizeOfCall:
    """Return the rows and tokens of a call that is made often, by its first argument
    with a shape.
    """
    for value in (*args, *kwargs.values()):
        shape = getattr(value, "shape", ())
        if shape:
            return int(shape[0]), int(shape[1]) if len(shape) == 2 else None, None
    return NO_SIZE
