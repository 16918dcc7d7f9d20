"""The watch as a decorator: a plain function's and a coroutine's calls are rows, a generator's steps are watched one by one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oomguard.errors import UsageError
from oomguard.guarding.wrap import enter_around, is_special

if TYPE_CHECKING:
    from oomguard.instrumentation.watch import Watch

F = TypeVar("F", bound=Callable[..., Any])


def decorate(watch: Watch, function: F) -> F:
    """Return the function under a watch; raises UsageError for what is no function."""
    if isinstance(function, type) or not callable(function):
        what = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
        hint = "watch a function or a method, or a block: with oomguard.watch() as seen: ..."
        raise UsageError(f"watch expects a function, not {what}", hint=hint)
    name, runs = _name(function), _runs(function)
    if inspect.iscoroutinefunction(runs):
        decorated = _coroutine(watch, runs, name)
    else:
        decorated = enter_around(runs, _Steps(watch)) or _plain(watch, runs, name)
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


def _runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what tells whether its calls are coroutines or generators: of an object with such a ``__call__`` that method."""
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return function
    method = getattr(function, "__call__", function)  # noqa: B004 - not whether it can be called, but what is
    return method if is_special(method) else function


def _name(function: Callable[..., Any]) -> str:
    """Return what a row calls it: a function's name, that of a partial's function, or the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__qualname__


def _plain(watch: Watch, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with watch, watch.row(name, "function"):
            return function(*args, **kwargs)

    return call


def _coroutine(watch: Watch, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with watch, watch.row(name, "function"):
            return await function(*args, **kwargs)

    return coroutine
