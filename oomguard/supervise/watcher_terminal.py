"""The command's terminal as the watcher has it: it leads the session, brings the command to the foreground, restores ours.

The command is no session leader itself: the terminal's stop keys do nothing to a group that nobody in its session waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
from dataclasses import dataclass

from oomguard.supervise.terminal_modes import Modes, is_same, read_modes, set_modes


@dataclass(frozen=True, slots=True)
class Given:
    """The terminal that a command is started on.

    Attributes:
        theirs: its end of the pseudo-terminal.
        streams: the standard streams that it is.
        controls: whether the command is a job of a session on it.
        in_front: whether it begins in the foreground.
    """

    theirs: int
    streams: frozenset[int]
    controls: bool
    in_front: bool

    @property
    def words(self) -> tuple[tuple[int, ...], bool, bool]:
        """What the watcher is told with the descriptor."""
        return tuple(sorted(self.streams)), self.controls, self.in_front


class Lent:
    """Our user's terminal while oomguard has set it: the descriptor, its modes before, and those that oomguard set."""

    def __init__(self) -> None:
        self._own: tuple[int, Modes, Modes] | None = None

    def note(self, descriptors: list[int], saved: Modes | None, set_to: Modes | None) -> None:
        """Note what oomguard is about to set, without descriptors that it has set it back."""
        if self._own is not None:
            os.close(self._own[0])
        self._own = (descriptors[0], saved, set_to) if descriptors and saved and set_to else None

    def restore(self) -> None:
        """Set the terminal as it was where it still is as oomguard left it."""
        if self._own is not None:
            fd, saved, set_to = self._own
            modes = read_modes(fd)
            if modes is not None and is_same(modes, set_to):
                set_modes(fd, saved)


def has_terminal() -> bool:
    """Return whether a terminal controls the session."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class WatcherTerminal:
    """The watcher's side of one attempt's terminal."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._theirs: int | None = given.theirs

    @classmethod
    def of(cls, descriptors: list[int], words: tuple[tuple[int, ...], bool, bool] | None) -> WatcherTerminal | None:
        """Return the terminal that came with a message; None without ``Given.words``."""
        if words is None:
            return None
        streams, controls, in_front = words
        return cls(Given(descriptors[0], frozenset(streams), controls, in_front))

    @property
    def controls(self) -> bool:
        """Whether the command is a job of our own session."""
        return self._given.controls

    def begin(self) -> None:
        """Lead a session that this terminal controls."""
        if self.controls:
            if os.getsid(0) != os.getpid():
                os.setsid()
            fcntl.ioctl(self._given.theirs, termios.TIOCSCTTY, 0)

    def become(self) -> dict[int, int]:
        """In the command's process: be a job of that session; return which descriptor each standard stream is."""
        if self.controls:
            os.setpgid(0, 0)
            if self._given.in_front:
                os.tcsetpgrp(self._given.theirs, os.getpid())
        return dict.fromkeys(self._given.streams, self._given.theirs)

    def bring(self, group: int) -> None:
        """Bring a process group to the foreground."""
        if self._theirs is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.tcsetpgrp(self._theirs, group)

    def close(self) -> None:
        """Let go of the command's end once it has ended, so that ours sees the end of what was printed."""
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None
