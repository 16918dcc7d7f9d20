"""The watch as a decorator: a plain function's and a coroutine's calls are rows, a generator's steps are watched one by one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oomguard.errors import UsageError
from oomguard.guarding.wrap import enter_around

if TYPE_CHECKING:
    from oomguard.instrumentation.watch import Watch

F = TypeVar("F", bound=Callable[..., Any])


def decorate(watch: Watch, function: F) -> F:
    """Return the function under a watch; raises UsageError for what is no function."""
    if isinstance(function, type) or not callable(function):
        what = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
        hint = "watch a function or a method, or a block: with oomguard.watch() as seen: ..."
        raise UsageError(f"watch expects a function, not {what}", hint=hint)
    if inspect.iscoroutinefunction(function):
        decorated = _coroutine(watch, function)
    else:
        decorated = enter_around(function, _Steps(watch)) or _plain(watch, function)
    decorated.seen = watch  # type: ignore[attr-defined]
    return cast("F", decorated)


class _Steps:
    """What is entered for each step of a generator: the next one follows soon, and the sampling thread stays for it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.leave(kind, stays=True)


def _plain(watch: Watch, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with watch, watch.row(function.__qualname__, "function"):
            return function(*args, **kwargs)

    return call


def _coroutine(watch: Watch, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with watch, watch.row(function.__qualname__, "function"):
            return await function(*args, **kwargs)

    return coroutine
