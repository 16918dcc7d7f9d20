"""Let a call that runs out of memory wait for other threads' calls, then run alone.

Otherwise each call would take its size from what the others happen to leave, and the first one to
be split would starve. Every wait has a limit, so threads that wait for each other are not blocked
forever. After the limit a call runs as without this module.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any, Final

from oomguard.core.log import get_logger
from oomguard.guarding.failure import clear, is_out_of_memory
from oomguard.probe import torch_memory

_MOST_WAIT_S: Final = 60.0

_changed = threading.Condition()
# The model of each thread's guarded call.
_running: Final[dict[int, Any]] = {}
# The calls that run alone, by thread: their devices, and until when others wait for them.
_alone: Final[dict[int, tuple[frozenset[str], float]]] = {}


def _renew() -> None:
    """Clear the state in a fork of this process, where no other thread runs."""
    global _changed  # noqa: PLW0603 - one for this process
    _changed = threading.Condition()
    _running.clear()
    _alone.clear()


os.register_at_fork(after_in_child=_renew)


def begin(model: Any) -> bool:
    """Register a call of this thread, after those that run alone on its device.

    Args:
        model: the call's model; None: a function of the user, which may use any device.

    Returns:
        Whether to call ``end`` after it; False inside another registered call of this thread.
    """
    if threading.get_ident() in _running:
        return False
    # Every guarded call comes here, so the lock is taken only if some call runs alone.
    if _alone:
        devices = _devices_of(model)
        with _changed:
            _wait_until_free(devices)
    _running[threading.get_ident()] = model
    return True


def end() -> None:
    """Unregister this thread's call."""
    _running.pop(threading.get_ident(), None)
    if _alone:
        with _changed:
            _changed.notify_all()


def have_ended(error: BaseException, model: Any) -> bool:
    """Wait once for the other calls after an out-of-memory; return whether there were any.

    If there were, the failed call is to run again. Until ``leave``, other calls that begin wait for
    it, for at most a minute.

    Args:
        error: the exception of the failed call.
        model: its model.
    """
    me = threading.get_ident()
    # A call that ran alone had all the memory, so another wait would not help.
    if me in _alone or not (others_run() or _alone):
        return False
    devices = _devices_of(model)
    with _changed:
        if not _others_run_on(devices) and not _others_are_alone_on(devices):
            return False
    if not is_out_of_memory(error):
        return False
    get_logger().warning(
        "Out of memory while other threads used the GPU; retrying this call alone after them"
    )
    # The other calls need the memory of this one.
    clear(error)
    torch_memory.release()
    with _changed:
        # Other failed calls do not wait for this one.
        _running.pop(me, None)
        _changed.notify_all()
        # Two calls that both count as alone would wait for each other.
        _wait_until_free(devices)
        _alone[me] = devices, time.monotonic() + _MOST_WAIT_S
        _changed.wait_for(lambda: not _others_run_on(devices), _MOST_WAIT_S)
    return True


def others_run() -> bool:
    """Return whether a guarded call of another thread runs now, on any device.

    If one does, the memory that this thread's call takes cannot be measured.
    """
    others = len(_running)
    if threading.get_ident() in _running:
        others -= 1
    return others > 0


def leave() -> None:
    """Let other threads' calls run again."""
    if _alone.pop(threading.get_ident(), None) is not None:
        with _changed:
            _changed.notify_all()


def _wait_until_free(devices: frozenset[str]) -> None:
    """Wait while another call runs alone on one of the devices, up to the limit."""
    while (until_s := _others_are_alone_on(devices)) and (left_s := until_s - time.monotonic()) > 0:
        _changed.wait(left_s)


def _others_are_alone_on(devices: frozenset[str]) -> float:
    """Return until when another thread's call runs alone on one of the devices; 0: none does."""
    me = threading.get_ident()
    latest = 0.0
    # A copy, because other threads change the table meanwhile.
    for thread, (on, until) in list(_alone.items()):
        if thread != me and _may_overlap(on, devices):
            latest = max(latest, until)
    return latest


def _others_run_on(devices: frozenset[str]) -> bool:
    me = threading.get_ident()
    for thread, model in list(_running.items()):
        if thread != me and _may_overlap(_devices_of(model), devices):
            return True
    return False


def _may_overlap(devices: frozenset[str], others: frozenset[str]) -> bool:
    """Return whether two calls may share a device; those without known devices may."""
    return not devices or not others or bool(devices & others)


def _devices_of(model: Any) -> frozenset[str]:
    """Return the devices of a model's parameters; empty if they are unknown."""
    # The model may be any object of the user, whose errors must not replace the failure.
    with contextlib.suppress(Exception):
        return frozenset(str(parameter.device) for parameter in model.parameters())
    return frozenset()
