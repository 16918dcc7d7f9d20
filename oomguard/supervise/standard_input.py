"""Standard input, kept while it is passed on, so that a command that is run again reads it from its beginning.

A file is read again from where it stood. Of a pipe what the command reads is kept. A terminal, a socket of the network and a pipe that
is open for writing too are the command's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from types import TracebackType

from oomguard.supervise.feeding import Feeder, can_feed
from oomguard.supervise.kept_input import KeptInput


class StandardInput:
    """What ``fd`` gives, for one attempt after another: enter, give ``for_child`` to the command, ``end`` the attempt.

    Args:
        fd: our own standard input.
        keeps: whether the command may be run again; without that nothing is kept, and the command has ``fd`` itself.
    """

    def __init__(self, fd: int = 0, *, keeps: bool = True) -> None:
        self._fd = fd
        self._kept: KeptInput | None = None
        self._start: int | None = None
        self._own: str | None = None
        self._feeder: Feeder | None = None
        with contextlib.suppress(OSError):
            if keeps and stat.S_ISFIFO(os.fstat(fd).st_mode) and _is_writable(fd):
                self._own = "standard input is a pipe that is open for writing too, which is the command's own"
            elif keeps and can_feed(fd):
                self._kept = KeptInput()
            elif keeps and stat.S_ISSOCK(os.fstat(fd).st_mode):
                self._own = "standard input is a socket of the network, which is the command's own"
            elif stat.S_ISREG(os.fstat(fd).st_mode):
                self._start = os.lseek(fd, 0, os.SEEK_CUR)

    def __enter__(self) -> StandardInput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def for_child(self) -> int | None:
        """Return the descriptor that is the command's standard input, to be closed once it runs; None: our own.

        What an earlier attempt read comes first.
        """
        if self._start is not None:
            os.lseek(self._fd, self._start, os.SEEK_SET)
        if self._kept is None:
            return None
        reader, writer = os.pipe()
        os.set_blocking(reader, os.get_blocking(self._fd))
        self._feeder = Feeder(self._fd, writer, self._kept)
        self._feeder.start()
        return reader

    def end(self) -> None:
        """End an attempt: nothing more is read for it."""
        if self._feeder is not None:
            self._feeder.stop()
            self._feeder = None

    @property
    def lost(self) -> str | None:
        """Why a command that is run again could not read what this one read, None where it could."""
        return self._kept.lost if self._kept is not None else self._own


def _is_writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
