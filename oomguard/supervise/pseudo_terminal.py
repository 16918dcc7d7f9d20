"""A pseudo-terminal for one attempt: the command has one end, we have the other; it begins as the user's own terminal is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import threading
import time
from typing import Final

from oomguard.supervise.lasting_modes import Set
from oomguard.supervise.terminal_modes import Modes, is_same, read_modes, set_modes, unseen
from oomguard.supervise.typed_ahead import left_unread

_SIZE: Final = struct.Struct("HHHH")
_TIOCGPTPEER: Final = 0x5441  # asm-generic/ioctls.h
# What a terminal certainly holds; and how long it may take to have it on a busy machine.
_UNSEEN_BYTES: Final = 4000
_UNSEEN_S: Final = 1.0


class PseudoTerminal:
    """Both ends of it.

    Args:
        like: the terminal whose size it has.

    Attributes:
        ours: what is written there is typed, what is read there was printed.
        theirs: the command's terminal.

    Raises:
        OSError: no terminal can be had (no /dev/pts, or all are in use).
    """

    def __init__(self, like: int) -> None:
        self.ours, self.theirs = os.openpty()
        os.set_blocking(self.ours, False)
        self._like = like
        self._closing = threading.Lock()
        self._given = self.modes
        self._size = b""
        self.copy_size()

    @property
    def modes(self) -> Modes | None:
        """The modes that the command sees, and may have set."""
        return read_modes(self.ours)

    def has_output(self) -> bool:
        """Return whether something was printed that nobody has read."""
        poll = select.poll()
        poll.register(self.ours, select.POLLIN)
        return any(events & select.POLLIN for _, events in poll.poll(0))

    def begin_as(self, modes: Modes) -> None:
        """Set the modes, unless the command has set its own."""
        now = self.modes
        if now is not None and self._given is not None and is_same(now, self._given):
            set_modes(self.ours, modes)
            self._given = self.modes

    def type_unseen(self, data: bytes) -> int:
        """Type what its user has seen, so that it is not shown again; return how much.

        For a command that has not begun or is stopped: it would meet other modes than its own. The terminal takes what is
        typed in its own time. So a stop and a start of the output follow, which it tells.
        """
        modes = self.modes
        if modes is None or not 0 < len(data) <= _UNSEEN_BYTES:
            return 0
        others = (bytes([n]) for n in range(1, 256) if n not in data and bytes([n]) not in modes[6])
        stop, start = next(others, b""), next(others, b"")
        if not start:
            return 0
        set_modes(self.ours, unseen(modes, (stop, start)))
        try:
            self._tell_flow(tells=True)
            count = os.write(self.ours, data + stop + start)
            self._wait_for_flow()
        except OSError:  # no room at all
            return 0
        finally:
            self._tell_flow(tells=False)
            set_modes(self.ours, modes)
        return min(count, len(data))

    def _tell_flow(self, *, tells: bool) -> None:
        fcntl.ioctl(self.ours, termios.TIOCPKT, struct.pack("i", tells))

    def _wait_for_flow(self) -> None:
        poll, until_s = select.poll(), time.monotonic() + _UNSEEN_S
        poll.register(self.ours, select.POLLPRI)
        while not poll.poll(0) and time.monotonic() < until_s:  # the kernel wakes nobody who waits for this alone
            time.sleep(0.0005)

    def unread(self, end: bytes) -> bytes:
        """Return what was typed and not read, ``end`` for each Ctrl-D, once the command has ended."""
        modes = self.modes
        try:
            theirs = fcntl.ioctl(self.ours, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return left_unread(theirs, modes, end) if modes is not None else b""
        finally:
            os.close(theirs)

    def copy_size(self) -> bool:
        """Give it the size of the user's window where that is another one now; return whether the command is told of it."""
        with self._closing, contextlib.suppress(OSError):
            wanted = _size(self._like)
            if wanted != self._size:  # else the command may have set its own
                self._size, before = wanted, _size(self.ours)
                fcntl.ioctl(self.ours, termios.TIOCSWINSZ, wanted)
                return wanted != before
        return False

    def was_set(self) -> Set | None:
        """Return what the command has set, and left so."""
        modes, other = self.modes, None
        with self._closing, contextlib.suppress(OSError):  # no size of the user's is on its way
            size = _size(self.ours)
            other = size if size != self._size else None
        if modes is None or self._given is None or (modes == self._given and other is None):
            return None
        return Set(self._given, modes, other)

    def close_theirs(self) -> None:
        """Leave the command's end to the command."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def close(self) -> None:
        """Close it: what still has it is hung up."""
        self.close_theirs()
        with self._closing:
            if self.ours >= 0:
                os.close(self.ours)
                self.ours = -1


def _size(fd: int) -> bytes:
    return fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(_SIZE.size))
