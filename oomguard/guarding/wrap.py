"""Enter a context while a coroutine or a generator runs its code.

A generator's code runs only between two steps of its caller, so the context is entered for each
step. ``send``, ``throw`` and ``close`` reach the function as without a wrapper.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

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
