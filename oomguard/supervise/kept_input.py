"""What the command has read of its standard input, kept in a file without a name for the next attempt."""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Final

from oomguard.supervise.pipes import waiting_bytes
from oomguard.supervise.recording import unlinked_file

CAP_BYTES: Final = 64 << 20


class KeptInput:
    """The bytes in the order in which they were read.

    Attributes:
        lost: why not all of them are there, None where they are.
    """

    def __init__(self) -> None:
        self._fd = unlinked_file()
        self._size_bytes = 0
        self.lost: str | None = None

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)

    def read(self, at: int, most_bytes: int) -> bytes:
        """Return some of it from offset ``at``, nothing at its end."""
        return os.pread(self._fd, min(most_bytes, self._size_bytes - at), at)

    def take(self, source: int, count: int) -> None:
        """Take so many bytes from a pipe or a socket where they wait, also those that cannot be kept."""
        if self._size_bytes + count > CAP_BYTES:
            self.lost = self.lost or f"more than {CAP_BYTES >> 20} MiB of standard input have been read"
        is_socket = stat.S_ISSOCK(os.fstat(source).st_mode)
        try:
            while count > 0 and (taken := (self._receive if is_socket else self._move)(source, count)):
                count -= taken
        except BlockingIOError:  # another process has read them, where we do
            return

    def _move(self, pipe: int, count: int) -> int:
        if self.lost is None:
            try:
                taken = os.splice(pipe, self._fd, count, offset_dst=self._size_bytes, flags=os.SPLICE_F_NONBLOCK)
            except BlockingIOError:
                raise
            except OSError as error:
                self._refused(error)
            else:
                self._size_bytes += taken
                return taken
        return len(os.read(pipe, min(count, waiting_bytes(pipe))))

    def _receive(self, source: int, count: int) -> int:
        data = receive(source, count, socket.MSG_DONTWAIT)
        try:
            if self.lost is None and os.pwrite(self._fd, data, self._size_bytes) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 - as the next write would
            self._size_bytes += len(data)
        except OSError as error:
            self._refused(error)
        return len(data)

    def _refused(self, error: OSError) -> None:
        self.lost = f"standard input could not be kept: {error.strerror}"


def receive(source: int, count: int, flags: int) -> bytes:
    """Receive from a socket that is ours by its number only."""
    with socket.socket(fileno=os.dup(source)) as own:
        return own.recv(count, flags)
