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
        own: the terminal that controls oomguard; None where it has none, and the command gets none that controls it.
        streams: the standard streams that it is.
        in_front: whether the command begins in its foreground.
    """

    theirs: int
    own: int | None
    streams: frozenset[int]
    in_front: bool

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What goes to the watcher."""
        return (self.theirs,) if self.own is None else (self.theirs, self.own)

    @property
    def words(self) -> tuple[tuple[int, ...], bool, bool]:
        """What the watcher is told with it."""
        return tuple(sorted(self.streams)), self.own is not None, self.in_front


class WatcherTerminal:
    """The watcher's side of one attempt's terminal."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._theirs: int | None = given.theirs
        self._saved: Modes | None = None
        self._raw: Modes | None = None

    @property
    def controls(self) -> bool:
        """Whether the command is a job of a session of ours."""
        return self._given.own is not None

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

    def lend(self, saved: Modes | None, set_to: Modes | None) -> None:
        """Note what oomguard sets on our user's terminal, and what was before; None: nothing."""
        self._saved, self._raw = saved, set_to

    def restore(self) -> None:
        """Set the user's terminal as it was where oomguard left it as it set it."""
        own = self._given.own
        if own is None or self._saved is None or self._raw is None:
            return
        modes = read_modes(own)
        if modes is not None and is_same(modes, self._raw):
            set_modes(own, self._saved)

    def command_ended(self) -> None:
        """Let go of the command's end, so that ours sees the end of what was printed."""
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None

    def close(self) -> None:
        """Close what is left, before the next attempt's."""
        self.command_ended()
        if self._given.own is not None:
            os.close(self._given.own)
