"""The guard as a decorator: of a function that calls engines, and of one that works on rows itself."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from oomguard.engines.known import guarded_remotely
from oomguard.engines.protocol import SizeOfCall
from oomguard.errors import SettingError, UsageError

# The modules, not what is in them: a decorated function that is sent to another process (Ray's, by cloudpickle) finds them there.
from oomguard.guarding import observing as told
from oomguard.guarding import watching as state
from oomguard.guarding.failure import run_guarded
from oomguard.guarding.function_call import RowsCall
from oomguard.guarding.handed_in import AsHandedIn
from oomguard.guarding.in_parts import in_parts
from oomguard.guarding.wrap import enter_around, is_special
from oomguard.observe.exceptions import may_be_oom
from oomguard.switch import disabled

if TYPE_CHECKING:
    from oomguard.guarding.guard import Guard

F = TypeVar("F", bound=Callable[..., Any])


def decorate(made: Guard, function: F) -> F:
    """Return the function under a guard of ``made``'s policy; raises UsageError for what is no function.

    Of what is called elsewhere (Ray's remote functions, classes of actors) the code is guarded, where it runs.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return cast("F", type(function)(decorate(made, function.__func__)))
    if not isinstance(function, (types.FunctionType, types.MethodType, type)):
        remote = guarded_remotely(function, functools.partial(_of_remote, made))
        if remote is not None:
            return cast("F", remote)
    if isinstance(function, type) or not callable(function):
        what = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
        hint = "guard a function or a method, or a block: with oomguard.guard(): ..."
        if isinstance(function, type) and "ray" in sys.modules:
            hint += "; the guard of an actor's class stands above @ray.remote"
        raise UsageError(f"guard expects a function, not {what}", hint=hint)
    current = made.for_function()
    decorated = _around(current, function)
    current.shows_on(decorated)
    return decorated


def _of_remote(made: Guard, function: F, *, is_method: bool = False) -> F:
    """Return the code of what is called elsewhere, guarded; a method without the arguments to split is guarded as it is."""
    is_whole = is_method and (
        is_special(function) or not set(made.batch) <= set(inspect.signature(function).parameters)
    )
    return decorate(made.for_function(batch=()) if is_whole else made, function)


def _as_watched(function: F) -> F:
    """Return an engine's method that was taken from its object before it was watched (``guard(model.generate)``) as it is now."""
    if isinstance(function, functools.partial):
        inner = _as_watched(function.func)
        return cast("F", functools.partial(inner, *function.args, **function.keywords))
    if not isinstance(function, types.MethodType):
        return function
    if not state.watching:
        state.watch()
    now = getattr(function.__self__, function.__name__, function)
    was = getattr(now, "__wrapped__", None)
    return cast("F", now) if was is function.__func__ else function


def _around(current: Guard, function: F) -> F:
    function = _as_watched(function)
    if not current.batch:
        return enter_around(function, current) or _guarding(current, function)
    for name in current.batch:
        if name not in inspect.signature(function).parameters:
            raise SettingError(f"{function.__qualname__} has no argument {name!r} to split")
    if is_special(function):
        what = "a generator" if inspect.isgeneratorfunction(function) else "async"
        hint = "without batch= the engine calls in it are split; or guard the plain function that it calls, with batch="
        raise SettingError(
            f"{function.__qualname__} is {what} and cannot be split, as batch= splits plain functions: {hint}"
        )
    return _splitting(current, function)


def _guarding(current: Guard, function: F) -> F:
    """Return the plain function with ``current`` in force while it runs; keep a call that succeeds cheap."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not state.watching:
            state.watch()
        if current.recording is not None:
            current.begin_recording()
        if current.known.after_kill:
            current.known.after_kill.tell_as_it_was()
        token = state.entered.set((*state.entered.get(), current))
        state.in_force.append(None)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            current.explain(error)
            raise
        finally:
            state.in_force.pop()
            state.entered.reset(token)

    return cast("F", call)


def _splitting(current: Guard, function: F) -> F:
    """Return the plain function, run in parts by its arguments ``batch`` where a call of it runs out of memory."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if told.observing and told.looking_on():
            with told.ToldCall(function.__qualname__, "", lambda: _size(current, function, args, kwargs)):
                return call(*args, **kwargs)
        if current.recording is not None:
            current.begin_recording()
        token = state.inside_call.set(True)
        handed_in = AsHandedIn(args, kwargs)
        try:
            if current.known and not disabled():
                result, error = _in_parts(current, function, args, kwargs, handed_in)
            else:
                result, error = run_guarded(function, args, kwargs)
                if error is not None and may_be_oom(error) and not disabled():
                    result, error = _in_parts(current, function, args, kwargs, handed_in, error)
        finally:
            state.inside_call.reset(token)
        try:
            if error is not None:
                current.explain(error)
                raise error
            return result
        finally:
            del error  # a frame that names its own exception is a cycle, and the exception holds the frames below

    return cast("F", call)


def _size(current: Guard, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> SizeOfCall:
    return RowsCall.of(function, current.batch, args, kwargs).rows, None, None


def _in_parts(
    current: Guard,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handed_in: AsHandedIn,
    failed: BaseException | None = None,
) -> tuple[Any, BaseException | None]:
    """Return the result of a call, run in parts, and None, or None and the exception to raise.

    ``failed`` is the exception of the whole call, where it has been run already.
    """
    rows, unread = run_guarded(RowsCall.of, (function, current.batch, args, kwargs, handed_in), {})
    if unread is not None and failed is None:
        return run_guarded(function, args, kwargs)  # the function itself says what is wrong with its arguments
    if unread is None:
        return in_parts(current, function, rows, None if failed is None else [failed])
    assert failed is not None  # noqa: S101 - a call that could not be read has failed
    current.explain(failed)
    return None, failed
