"""Whether a run is still alive: it binds a socket name that the kernel frees when its process dies.

The name belongs to a socket without a file, so any user of the machine can ask and nothing has to
be cleaned up. Names are per network namespace: a container with the host's name and its own network
counts as dead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import socket
import weakref
from typing import Final

# A leading NUL makes it one of Linux's abstract names (unix(7)); other systems have none, and
# nothing is known there.
_NAME: Final = "\0oomguard-run-"


class LivenessLock:
    """Marks a run as alive from here until ``release`` or the death of this process.

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
        """Mark the run as over."""
        if self._close is not None:
            self._close()


def is_alive(session: str, host: str | None) -> bool | None:
    """Return whether the run that began on ``host`` is alive; None: this machine cannot know."""
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
