"""Guarded ``generate`` calls of other threads on one device: a call that runs out of memory beside
them waits, and goes on alone.

Each would else take its size from what the others happen to leave, and the one that is split first
would starve. A thread that waits for another in its own way is not held up for good: every wait has
an end, behind which all is as if nobody had waited.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any, Final

from oomguard.core.log import get_logger
from oomguard.guarding.failure import clear, is_memory_failure, scan_error
from oomguard.probe import torch_memory

_MOST_WAIT_S: Final = 60.0

_changed = threading.Condition()
# The model of the guarded call that each thread is in.
_running: Final[dict[int, Any]] = {}
# The calls that go on alone, by thread: on which devices, and until when others wait for them.
_alone: Final[dict[int, tuple[frozenset[str], float]]] = {}


def _renew() -> None:
    """In a fork of this process no other thread goes on."""
    global _changed  # noqa: PLW0603 - of this process
    _changed = threading.Condition()
    _running.clear()
    _alone.clear()


os.register_at_fork(after_in_child=_renew)


def begin(model: Any) -> None:
    """Note that this thread begins a call; wait first while another thread's goes on alone on the
    same device.
    """
    if _alone:
        devices = _devices_of(model)
        with _changed:
            _wait_until_free(devices)
    _running[threading.get_ident()] = model


def end() -> None:
    """Note that this thread's call has ended."""
    _running.pop(threading.get_ident(), None)
    if _alone:
        with _changed:
            _changed.notify_all()


def have_ended(error: BaseException, model: Any) -> bool:
    """Wait, once, for the calls beside one that failed for memory, and return whether there were
    any: it is then to be made again.

    Until ``leave`` others that begin wait for it, a minute at most.

    Args:
        error: what the call failed of.
        model: what it is made on.
    """
    me = threading.get_ident()
    if (
        me in _alone
        or not _running
        or not is_memory_failure(error)
        or scan_error(error).first_cause is None
    ):
        return False
    devices = _devices_of(model)
    with _changed:
        if not _others_run_on(devices) and not _others_are_alone_on(devices):
            return False
    clear(error)  # what the failed call holds is missing to the others
    torch_memory.release()
    with _changed:
        _running.pop(me, None)  # who failed beside this one does not wait for it
        _changed.notify_all()
        _wait_until_free(devices)
        _alone[me] = devices, time.monotonic() + _MOST_WAIT_S
        _changed.wait_for(lambda: not _others_run_on(devices), _MOST_WAIT_S)
    get_logger().warning("out of memory beside calls of other threads: once more, alone")
    return True


def leave() -> None:
    """Let the others go on."""
    if _alone.pop(threading.get_ident(), None) is not None:
        with _changed:
            _changed.notify_all()


def _wait_until_free(devices: frozenset[str]) -> None:
    """Wait while another call goes on alone on one of the devices, no longer than it may keep
    others waiting.
    """
    while (until_s := _others_are_alone_on(devices)) and (left_s := until_s - time.monotonic()) > 0:
        _changed.wait(left_s)


def _others_are_alone_on(devices: frozenset[str]) -> float:
    """Return until when other threads' calls go on alone on one of the devices; 0 where
    none does.
    """
    me = threading.get_ident()
    return max(
        (until for thread, (on, until) in list(_alone.items()) if thread != me and on & devices),
        default=0.0,
    )


def _others_run_on(devices: frozenset[str]) -> bool:
    me = threading.get_ident()
    return any(
        _devices_of(model) & devices for thread, model in list(_running.items()) if thread != me
    )


def _devices_of(model: Any) -> frozenset[str]:
    """Return the devices of a model's parameters; none where nothing tells."""
    with contextlib.suppress(Exception):
        return frozenset(str(parameter.device) for parameter in model.parameters())
    return frozenset()
