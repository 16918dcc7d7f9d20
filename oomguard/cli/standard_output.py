"""Handle our own output if it is lost: its reader is gone (``| head``), or the disk is full.

Python would try its remaining output once more at exit, and exit with status 120.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Final

# The status of a program that SIGPIPE ends (grep, git, cat). --exit-code never gives it.
GONE_STATUS: Final = 141
FULL_STATUS: Final = 2
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class OutputLostError(Exception):
    """Report that printed text did not arrive.

    It is not an OSError, because click turns that into its own exit status.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__(os.strerror(number or errno.EIO))
        if number == errno.EPIPE:
            self.exit_status = GONE_STATUS
        else:
            self.exit_status = FULL_STATUS


@contextlib.contextmanager
def separate_lost_output() -> Iterator[None]:
    """Raise OutputLostError for a failed write to a descriptor, but not for a named file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in {errno.EPIPE, *_FULL}:
            raise OutputLostError(error.errno) from error
        raise


def flush_stream(number: int) -> OutputLostError | None:
    """Flush standard output (1) or error (2); on failure drop the rest and return the failure."""
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
