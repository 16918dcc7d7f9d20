"""Guarded calls of several threads on one device: where one runs out of memory, those beside it end first, and it goes on alone.

Each would else take its size from what the others happen to leave, and the one that was split first would starve. A thread that waits
for another in its own way is not held up for good: every wait has an end, and behind it all is as if nobody had waited.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

# Calls beside one that failed after so many seconds most likely end within this many times that.
_TIMES_ITS_OWN: Final = 10
_LEAST_WAIT_S: Final = 10.0
_MOST_WAIT_S: Final = 60.0

_changed = threading.Condition()
# The model of the guarded call that each thread is in.
_running: Final[dict[int, Any]] = {}
# The thread whose call goes on alone, by device.
_alone: Final[dict[str, int]] = {}


def _renew() -> None:
    """In a fork of this process no other thread goes on."""
    global _changed  # noqa: PLW0603 - of this process
    _changed = threading.Condition()
    _running.clear()
    _alone.clear()


os.register_at_fork(after_in_child=_renew)


def begin(model: Any) -> None:
    """Note that this thread begins a guarded call; wait first while another thread's goes on alone on the device."""
    if _alone:
        device = _device_of(model)
        with _changed:
            _changed.wait_for(lambda: _alone.get(device, _me()) == _me(), _MOST_WAIT_S)
    _running[_me()] = model


def end() -> None:
    """Note that this thread's call has ended."""
    _running.pop(_me(), None)
    if _alone:
        with _changed:
            _changed.notify_all()


@contextlib.contextmanager
def alone(model: Any, took_s: float, let_go: Callable[[], object]) -> Iterator[bool]:
    """Run the rest of a call that failed for memory once those beside it have ended; give whether there were any.

    Args:
        model: what the call is made on.
        took_s: the seconds after which it failed.
        let_go: called before any wait: what the failed call holds is missing to the others.
    """
    device = _device_of(model)
    _running.pop(_me(), None)  # another one that failed waits for it no more
    others = device in _alone or _are_beside(device)
    if others:
        let_go()
    with _changed:
        _changed.notify_all()
        if others:
            _changed.wait_for(lambda: device not in _alone, _MOST_WAIT_S)
        mine = _alone.setdefault(device, _me()) == _me()
        if others:
            wait_s = min(_MOST_WAIT_S, max(_LEAST_WAIT_S, _TIMES_ITS_OWN * took_s))
            _changed.wait_for(lambda: not _are_beside(device), wait_s)
    try:
        yield others
    finally:
        with _changed:
            if mine:
                del _alone[device]
            _changed.notify_all()


def _are_beside(device: str) -> bool:
    """Return whether another thread is in a guarded call on a device."""
    return any(_device_of(model) == device for thread, model in list(_running.items()) if thread != _me())


def _device_of(model: Any) -> str:
    """Return the device of a model's first parameter; "" where nothing tells."""
    with contextlib.suppress(Exception):
        return str(next(iter(model.parameters())).device)
    return ""


def _me() -> int:
    return threading.get_ident()
