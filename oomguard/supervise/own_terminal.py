"""The terminal that we were started on: raw while the command is in its foreground, and as its user had it else."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from oomguard.supervise.terminal_modes import Modes, is_same, raw, read_modes, set_modes, unseen
from oomguard.supervise.typed_ahead import end_of_file, keys_ahead, may_type_back, type_back, typed_ahead
from oomguard.supervise.watcher import Watcher

_OWN_SHARE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Shown:
    """Which of our standard streams are the terminal.

    Attributes:
        streams: of 0, 1 and 2; one of the last two at least.
        controls: whether it is the terminal that controls us: its keys are signals to us, and jobs take turns on it.
        in_front: whether the command has it from the start: it reads it, and no other member of a pipeline does.
    """

    streams: frozenset[int]
    controls: bool
    in_front: bool

    @property
    def output(self) -> int:
        """The stream that what is printed goes to."""
        return min(self.streams - {0})


def shown_on_terminal() -> Shown | None:
    """Return which streams are the terminal; None where our output goes elsewhere."""
    ours = frozenset(number for number in (0, 1, 2) if _controls_us(number))
    if ours & {1, 2}:
        others = {1, 2} - ours
        return Shown(ours, controls=True, in_front=0 in ours and not any(_has_reader(number) for number in others))
    first = next((number for number in (1, 2) if os.isatty(number)), None)
    if first is None:
        return None
    device = os.fstat(first).st_rdev
    same = frozenset(number for number in (1, 2) if os.isatty(number) and os.fstat(number).st_rdev == device)
    return Shown(same, controls=False, in_front=False)


def _controls_us(fd: int) -> bool:
    try:
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True


def _has_reader(fd: int) -> bool:
    """Return whether a descriptor leads to another process, which may read the terminal itself (``| less``)."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class OwnTerminal:
    """The terminal that controls us, opened anew: nothing that we set on our descriptor holds for the shell's.

    Args:
        watcher: restores it where we are killed.
        alone: whether no other member of our job prints on it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, watcher: Watcher, *, alone: bool) -> None:
        self.fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._watcher, self._alone = watcher, alone
        self._saved: Modes | None = None
        self._raw: Modes | None = None

    def is_foreground(self) -> bool:
        """Return whether the terminal is ours to read and set: our job is in its foreground."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return False

    def take(self, end: bytes) -> bytes:
        """Make it raw, also where somebody has set it since we did; return what was typed before, ``end`` for each Ctrl-D."""
        modes = read_modes(self.fd)
        if modes is None or (self._raw is not None and is_same(modes, self._raw)):
            return b""
        typed = typed_ahead(self.fd, modes, end)
        self._set(modes, raw(modes, adds_returns=not self._alone))
        return typed + keys_ahead(self.fd)

    def print_as(self, *, adds_returns: bool) -> None:
        """Go on adding carriage returns for the others of our job as long as the command's terminal does it for the command."""
        if self._saved is not None and not self._alone:
            wanted = raw(self._saved, adds_returns=adds_returns)
            if self._raw is not None and not is_same(wanted, self._raw):
                self._set(self._saved, wanted)

    def _set(self, saved: Modes, wanted: Modes) -> None:
        self._saved, self._raw = saved, wanted
        self._watcher.lend(self.fd, saved, wanted)
        set_modes(self.fd, wanted)

    @property
    def end_of_file(self) -> bytes:
        """What is Ctrl-D on it, as its user has it."""
        return end_of_file(self._saved)

    def type_back(self, seen: bytes, keys: bytes) -> None:
        """Leave to who reads here next what the command has not read, and what is typed at this moment, as long as it is raw.

        Args:
            seen: is not shown again.
            keys: nobody has met them yet.
        """
        modes = read_modes(self.fd)
        if self._saved is None or self._raw is None or modes is None or not is_same(modes, self._raw):
            return
        if not may_type_back():
            return
        keys += keys_ahead(self.fd)
        self._set(self._saved, unseen(self._saved))
        keys += keys_ahead(self.fd)  # what came between the two; nothing is before what is typed back
        type_back(self.fd, seen)
        if keys:
            self._set(self._saved, self._saved)
            type_back(self.fd, keys)

    def give_back(self) -> None:
        """Set it as it was, unless somebody has set it since we did."""
        if self._raw is None or self._saved is None:
            return
        modes = read_modes(self.fd)
        if modes is not None and is_same(modes, self._raw):
            set_modes(self.fd, self._saved)
        self._saved = self._raw = None
        self._watcher.lend_nothing()

    def close(self) -> None:
        """Give it back and close it."""
        self.give_back()
        os.close(self.fd)


def stop_ourselves(number: int, *, told: SimpleQueue[int] | None) -> None:
    """Stop as a job of a shell does, by the signal itself; return when we go on, at once where no shell waits for us.

    Args:
        number: the signal that stopped the command.
        told: where the rest of our process group has not had it, at a key that only the command got: the job signals that
            the thread which reads signals gets. Our own share among them has stopped nobody.
    """
    is_ignored = signal.getsignal(number) is signal.SIG_IGN
    before = signal.signal(number, signal.SIG_DFL)
    masked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    try:
        # All at once: a shell that has seen the leader stop may continue the job before a second signal stops us, for good.
        if told is None or is_ignored or _stop_group(number, told) == number:
            signal.pthread_kill(
                threading.get_ident(), number
            )  # to this thread: the one that reads signals would take another
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        signal.signal(number, before)


def _stop_group(number: int, told: SimpleQueue[int]) -> int | None:
    """Stop our process group, and us with it; return the first job signal that was read then, None where none came."""
    with contextlib.suppress(Empty):
        while True:
            told.get_nowait()
    with contextlib.suppress(OSError):
        os.killpg(0, number)
    with contextlib.suppress(Empty):
        return told.get(timeout=_OWN_SHARE_S)
    return None
