"""A pseudo-terminal for one attempt: the command has one end, we have the other; it begins as the user's own terminal is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
import threading
from typing import Final

from oomguard.supervise.terminal_modes import Modes, is_same, read_modes, set_modes

_SIZE: Final = struct.Struct("HHHH")


class PseudoTerminal:
    """Both ends of it.

    Args:
        like: the terminal whose size it has.

    Attributes:
        ours: what is written there is typed, what is read there was printed.
        theirs: the command's terminal.

    Raises:
        OSError: there is none (no /dev/pts, or all are in use).
    """

    def __init__(self, like: int) -> None:
        self.ours, self.theirs = os.openpty()
        os.set_blocking(self.ours, False)
        self._like = like
        self._closing = threading.Lock()
        self._given = self.modes
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

    def copy_size(self) -> bool:
        """Give it the size of the user's window; return whether that is another one, which the command is told of."""
        with self._closing, contextlib.suppress(OSError):
            wanted = fcntl.ioctl(self._like, termios.TIOCGWINSZ, bytes(_SIZE.size))
            if wanted != fcntl.ioctl(self.ours, termios.TIOCGWINSZ, bytes(_SIZE.size)):
                fcntl.ioctl(self.ours, termios.TIOCSWINSZ, wanted)
                return True
        return False

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
