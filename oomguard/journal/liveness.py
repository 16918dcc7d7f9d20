"""Detect whether a run is alive: it binds a socket name that the kernel frees at its death.

The socket has no file, so any user of the machine can test the name, and nothing has to be cleaned
up. Names belong to a network namespace. A container with the host's name and its own network
therefore counts as dead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import socket
import weakref
from typing import Final

# The leading NUL makes it an abstract name of Linux (unix(7)). Other systems have none, so nothing
# is known there.
_NAME: Final = "\0oomguard-run-"


class LivenessLock:
    """Mark a run as alive until ``release`` or the death of this process.

    Args:
        session: the run's name in the journal.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        bound = _bound(session)
        if bound is None:
            self._close = None
        else:
            self._close = weakref.finalize(self, os.close, bound.detach())

    def release(self) -> None:
        """Mark the run as ended."""
        if self._close is not None:
            self._close()


def is_alive(session: str, host: str | None) -> bool | None:
    """Return whether the run that began on ``host`` is alive; None if this machine cannot know."""
    if host is None or host != platform.node():
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.bind(_NAME + session)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return True
        return None
    return False


def _bound(session: str) -> socket.socket | None:
    with contextlib.suppress(OSError, ValueError):
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.bind(_NAME + session)
        except BaseException:
            bound.close()
            raise
        return bound
    return None
