"""The descriptors 0, 1 and 2 as oomguard was started: which are missing, which can be written to, and whether
output and error are one."""

from __future__ import annotations

import contextlib
import fcntl
import os


def occupy() -> frozenset[int]:
    """Put the null device in the place of each standard stream that is closed; return which ones were.

    The next file opened would take their place.
    """
    closed = set()
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    return frozenset(closed)


def is_one_stream() -> bool:
    """Return whether standard output and error go to the same place (``2>&1``)."""
    try:
        return os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:
        return False


def writable() -> frozenset[int]:
    """Return those of standard output and error that can be written to; one that is open for reading only is the command's own."""
    found = set()
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                found.add(number)
    return frozenset(found)
