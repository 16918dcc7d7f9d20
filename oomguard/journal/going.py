"""Whether a run still goes on, asked on its own machine: it holds a name that the kernel lets go when it dies.

The name is that of a socket without a file, which any user of the machine finds taken and nobody has to clear away. It is told apart by
network namespace: a container that has the host's name and a network of its own is taken for over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import socket
import weakref
from typing import Final

# A leading NUL makes it one of Linux's abstract names (unix(7)); elsewhere it cannot be had, and nothing is known.
_NAME: Final = "\0oomguard-run-"


class Going:
    """Says that a run goes on, from here until ``end`` or the death of this process.

    Args:
        session: the run's name in the journal.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        held = _held(session)
        self._end = None if held is None else weakref.finalize(self, os.close, held.detach())

    def end(self) -> None:
        """Say it no more."""
        if self._end is not None:
            self._end()


def goes_on(session: str, host: str | None) -> bool | None:
    """Return whether the run that began on ``host`` still goes on; None: it cannot be told from here."""
    if host is None or host != platform.node():
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.bind(_NAME + session)
    except OSError as error:
        return True if error.errno == errno.EADDRINUSE else None
    return False


def _held(session: str) -> socket.socket | None:
    with contextlib.suppress(OSError, ValueError):
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(_NAME + session)
        except BaseException:
            held.close()
            raise
        return held
    return None
