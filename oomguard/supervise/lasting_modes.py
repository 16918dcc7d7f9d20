"""What a command set on its terminal by which it is left, as ``stty`` and ``reset`` do: its user's has it at the end of the run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
from dataclasses import dataclass

from oomguard.supervise.terminal_modes import Modes, read_modes, set_modes


@dataclass(frozen=True, slots=True)
class Set:
    """What a command set.

    Attributes:
        given: the modes that it began with.
        left: those that it ended with.
        size: that of the window, where it set another one.
    """

    given: Modes
    left: Modes
    size: bytes | None

    def on(self, modes: Modes) -> Modes:
        """Return modes with what was set."""
        flags = [
            m ^ ((m ^ left) & (given ^ left)) for m, given, left in zip(modes[:4], self.given, self.left, strict=False)
        ]
        speeds = [
            left if left != given else m
            for m, given, left in zip(modes[4:6], self.given[4:], self.left[4:], strict=False)
        ]
        of_keys = zip(modes[6], self.given[6], self.left[6], strict=True)
        return [*flags, *speeds, [left if left != given else m for m, given, left in of_keys]]


class Lasting:
    """Keeps it while what is told of the run is shown on the terminal as its user had it."""

    def __init__(self) -> None:
        self._set: Set | None = None

    def note(self, what: Set | None) -> None:
        """Note what the command of the last attempt has set."""
        self._set = what

    def apply(self) -> None:
        """Set it on the terminal that controls us, where that is ours to set."""
        if self._set is None:
            return
        with contextlib.suppress(OSError):
            fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.tcgetpgrp(fd) == os.getpgrp():
                    self._apply(fd, self._set)
            finally:
                os.close(fd)

    @staticmethod
    def _apply(fd: int, what: Set) -> None:
        modes = read_modes(fd)
        if modes is not None and (wanted := what.on(modes)) != modes:
            set_modes(fd, wanted)
        if what.size is not None:
            fcntl.ioctl(fd, termios.TIOCSWINSZ, what.size)
