"""What Linux can do with the bytes that wait in a pipe: count them, double them into another pipe, hold more of them or fewer;
and whether anybody reads them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import termios
from collections.abc import Callable
from typing import Final

_SPLICE_F_NONBLOCK: Final = 2  # linux/splice.h
_PAGE_BYTES: Final = 4096
_MOST_POWER: Final = 4  # pages of the pipe that nobody has resized: 2**4


def kernel_tee() -> Callable[[int, int, int], int] | None:
    """Return tee(2), which doubles what waits in a pipe into another one; None where the C library lacks it."""
    try:
        function = ctypes.CDLL(None, use_errno=True).tee
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
    function.restype = ctypes.c_ssize_t

    def tee(source: int, sink: int, count: int) -> int:
        found = int(function(source, sink, count, _SPLICE_F_NONBLOCK))
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return found

    return tee


def resize(pipe: int, size_bytes: int) -> None:
    """Let a pipe hold so many bytes; leave it where the system refuses."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size_bytes)
    except OSError:
        return


def shrink(pipe: int) -> None:
    """Let a pipe hold as little as it can: a page where it is empty, else a number of them that is a power of two and holds what waits."""
    for size_bytes in (_PAGE_BYTES << power for power in range(_MOST_POWER)):
        try:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size_bytes)
        except OSError:  # it holds more
            continue
        return


def waiting_bytes(fd: int) -> int:
    """Return how many bytes wait to be read; either end of a pipe tells."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def has_no_reader(fd: int) -> bool:
    """Return whether what is written to a pipe or a socket has nobody any more who could read it; a terminal always has."""
    if os.isatty(fd):
        return False
    poll = select.poll()
    poll.register(fd, 0)  # errors and hang-ups are told unasked
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))
