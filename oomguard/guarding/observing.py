"""Who looks on while watched calls run: told of each outermost call and of the attempts inside it, and changes nothing.

Context variables hold them, so threads and tasks outside see nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol

from oomguard.engines.protocol import SizeOfCall
from oomguard.incident import Attempt


class CallSize(NamedTuple):
    """How large a call is; None where nothing tells."""

    rows: int | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None


class LookedOn(Protocol):
    """A call that runs while somebody looks on."""

    def attempted(self, attempt: Attempt) -> None:
        """Take an attempt of a guard that ended."""

    def ended(self, error: BaseException | None) -> None:
        """Take the call's end, and what it raised."""


class Observer(Protocol):
    """Who looks on."""

    def began(self, what: str, model: str, size: CallSize) -> LookedOn:
        """Take the beginning of a call."""


observers: ContextVar[tuple[Observer, ...]] = ContextVar("oomguard_observers", default=())
_inside: ContextVar[tuple[LookedOn, ...] | None] = ContextVar("oomguard_looked_on", default=None)
# One entry for each observer, whichever thread it is in: while it is empty a call asks for no more than this.
observing: Final[list[None]] = []


def looking_on() -> tuple[Observer, ...]:
    """Return who is to be told of a call that begins now: nobody inside another call."""
    return () if _inside.get() is not None else observers.get()


@contextlib.contextmanager
def looked_on(what: str, model: str, size: Callable[[], CallSize]) -> Iterator[None]:
    """Tell those who look on of a call, from its beginning to its end; call it only where ``looking_on`` names somebody."""
    told = CallSize()
    with contextlib.suppress(Exception):  # arguments that the call itself refuses
        told = size()
    calls: list[LookedOn] = []
    for observer in looking_on():
        with no_mistake():
            calls.append(observer.began(what, model, told))
    token = _inside.set(tuple(calls))
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _inside.reset(token)
        for call in reversed(calls):
            with no_mistake():
                call.ended(error)
        del error  # a frame that names its own exception is a cycle, and the exception holds the frames below


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
    with looked_on(wrapped.__name__, type(engine).__name__, lambda: CallSize(*size(args, kwargs))):
        return wrapped(*args, **kwargs)


def attempted(attempt: Attempt) -> None:
    """Tell those who look on of an attempt inside the call that runs here."""
    for call in _inside.get() or ():
        with no_mistake():
            call.attempted(attempt)


@contextlib.contextmanager
def no_mistake() -> Iterator[None]:
    """Log what goes wrong in looking on: it never takes the place of what the user's call gives or raises."""
    try:
        yield
    except Exception:
        logging.getLogger("oomguard").exception("the watch failed")


def size_of_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSize:
    """Return the rows and tokens of a call that is made often, by its first argument with a shape."""
    for value in (*args, *kwargs.values()):
        shape = getattr(value, "shape", ())
        if shape:
            return CallSize(int(shape[0]), int(shape[1]) if len(shape) == 2 else None)
    return CallSize()
