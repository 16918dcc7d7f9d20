"""Our own output where nobody takes it: its reader has gone (``| head``), its disk is full.

What Python still holds of it would be tried once more at the end, and the exit status would be 120.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Final

# As of a program that the kernel ends for it (grep, git, cat): no status that --exit-code gives.
GONE_STATUS: Final = 141
FULL_STATUS: Final = 2
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class OutputLostError(Exception):
    """What was printed did not arrive; no OSError, of which click makes an exit status
    of its own.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__(os.strerror(number or errno.EIO))
        if number == errno.EPIPE:
            self.exit_status = GONE_STATUS
        else:
            self.exit_status = FULL_STATUS


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Raise OutputLostError for a failed write to a descriptor: what fails on a file that is named
    is another matter.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in {errno.EPIPE, *_FULL}:
            raise OutputLostError(error.errno) from error
        raise


def pass_on(number: int) -> OutputLostError | None:
    """Write what Python still holds of standard output (1) or error (2); where that fails drop it,
    and return the failure.
    """
    stream = {1: sys.stdout, 2: sys.stderr}[number]
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
        return OutputLostError(getattr(error, "errno", None))
    return None
