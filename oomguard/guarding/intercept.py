"""Intercept watched calls, and know which guards are active where they are called.

Context variables hold the guards, so other threads and tasks are not affected.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from oomguard.core.incident import Attempt
from oomguard.core.process import disabled
from oomguard.engines.protocol import (
    Handler,
    OverridingReader,
    ReadCall,
    size_of,
    with_recorded_state,
)
from oomguard.engines.registry import watch_calls
from oomguard.guarding.failure import add_note, is_memory_failure, run_guarded
from oomguard.guarding.observers import (
    GuardEvents,
    ObservedCall,
    looking_on,
    observed_calls,
    observing,
    size_of_tensors,
)
from oomguard.probe import torch_memory

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
        if not watching:
            from oomguard.engines.registry import watch_starts
            from oomguard.guarding.engine_start import started

            watch_calls(_watched, _watched_often, inside_call.get)
            watch_starts(started)
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
        failed, error = [error], None  # a local that names its own exception is a cycle
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
        return wrapped(*args, **kwargs)  # the path of every call outside a guard
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
    from oomguard.guarding.micro_batch import in_parts
    from oomguard.guarding.training import WHY_NOT

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
