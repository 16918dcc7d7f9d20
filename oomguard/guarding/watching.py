"""What every watched call goes through, and which guard is in force where it is called.

Context variables hold the guards, so threads and tasks outside them see nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from oomguard.engines.known import watch_calls
from oomguard.engines.protocol import Handler, ReadCall, WatchedCall
from oomguard.guarding.split import Owner, SplitRun
from oomguard.observe.exceptions import may_be_oom
from oomguard.switch import disabled

FailedCall = tuple[BaseException, WatchedCall]
# The guards that are entered in this thread or task, innermost last.
entered: ContextVar[tuple[Owner, ...]] = ContextVar("oomguard_guards", default=())
inside_call: ContextVar[bool] = ContextVar("oomguard_inside_call", default=False)
# Where blocks that are no guard want to know of the watched call that failed in them, innermost last.
_failed_calls: ContextVar[tuple[list[FailedCall], ...]] = ContextVar("oomguard_failed_calls", default=())
# What engines' calls go through once it is in place: a guarded call that succeeds asks for no more than this.
watching: Final[list[Handler]] = []


def watch() -> None:
    """Have the engines' calls go through here, once per process, unless everything is off."""
    if not watching and not disabled():
        from oomguard.engines.known import watch_starts
        from oomguard.guarding.start import started

        watch_calls(_watched)
        watch_starts(started)
        watching.append(_watched)


@contextlib.contextmanager
def noting_failed_calls() -> Iterator[list[FailedCall]]:
    """Note the last watched call that fails for memory inside, outside any guard, with its exception, which is raised as it is."""
    watch()
    failed: list[FailedCall] = []
    _failed_calls.set((*_failed_calls.get(), failed))
    try:
        yield failed
    finally:  # no token: a generator may be resumed in another context
        _failed_calls.set(tuple(other for other in _failed_calls.get() if other is not failed))


def _watched(
    read: ReadCall, wrapped: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a watched call: as it is, unless a guard is in force and no watched call is around it."""
    guards = entered.get()
    if inside_call.get() or disabled():
        return wrapped(*args, **kwargs)
    if not guards:
        failed = _failed_calls.get()
        if not failed:
            return wrapped(*args, **kwargs)
        try:
            return wrapped(*args, **kwargs)
        except Exception as raised:
            if may_be_oom(raised):
                with contextlib.suppress(Exception):
                    # Only the last one counts, and it must not keep the others' inputs.
                    failed[-1][:] = [(raised, read(model, args, kwargs))]
            raise
    token = inside_call.set(True)
    try:
        result, error = SplitRun(guards[-1], wrapped, read(model, args, kwargs)).run()
    finally:
        inside_call.reset(token)
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # a frame that names its own exception is a cycle, and the exception holds the frames below
