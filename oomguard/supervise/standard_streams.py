"""The descriptors 0, 1 and 2 where oomguard was started without them: the next file opened would take their place."""

from __future__ import annotations

import os


def occupy() -> frozenset[int]:
    """Put the null device in the place of each standard stream that is closed; return which ones were."""
    closed = set()
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    return frozenset(closed)
