"""Run the command as a job on the user's terminal, through a pseudo-terminal.

The user's own terminal is raw while the command is in its foreground.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import stat
import struct
import termios
import threading
import time

# The public module queue loads three more modules.
from _queue import Empty, SimpleQueue
from collections.abc import Callable
from typing import Final, NamedTuple

from oomguard.supervisor.failsafe import PROGRESS
from oomguard.supervisor.reaper import Reaper
from oomguard.supervisor.reaper_process import ChildTerminal
from oomguard.supervisor.signal_sets import JOB_STOPS, SI_KERNEL
from oomguard.supervisor.streams import Tee
from oomguard.supervisor.terminal_modes import (
    LineEnds,
    Modes,
    echo_bytes,
    end_of_file,
    for_background,
    is_same,
    keys_ahead,
    raw,
    read_modes,
    set_modes,
    stop_keys,
    typed_ahead,
)

_SIZE: Final = struct.Struct("HHHH")


class PseudoTerminal:
    """Hold both ends of a pseudo-terminal.

    Args:
        like: the terminal whose size it copies.

    Attributes:
        ours: our end; bytes written to it are typed, and bytes read from it were printed.
        theirs: the command's terminal.

    Raises:
        OSError: if no terminal is available (no /dev/pts, or all are in use).
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
        """The modes that the command sees, and may have set; None if they are gone."""
        return read_modes(self.ours)

    def has_output(self) -> bool:
        """Return whether unread output is waiting."""
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
        """Copy a changed size of the user's window; return whether the command is notified."""
        with self._closing, contextlib.suppress(OSError):
            wanted = _size(self._like)
            # Without a change of ours, the command may have set its own size.
            if wanted != self._size:
                self._size = wanted
                before = _size(self.ours)
                fcntl.ioctl(self.ours, termios.TIOCSWINSZ, wanted)
                return wanted != before
        return False

    def close_theirs(self) -> None:
        """Close our copy of the command's end."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def close(self) -> None:
        """Close it, which hangs up processes that still use it."""
        self.close_theirs()
        with self._closing:
            if self.ours >= 0:
                os.close(self.ours)
                self.ours = -1


def _size(fd: int) -> bytes:
    return fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(_SIZE.size))


_OWN_SHARE_S: Final = 0.05


class TerminalStreams(NamedTuple):
    """Say which of our standard streams are the terminal.

    Attributes:
        streams: a subset of 0, 1 and 2, with at least 1 or 2.
        controls: whether it is our controlling terminal: its keys send us signals, and jobs share
            it.
        in_front: whether the command is in the foreground from the start, because no other member
            of a pipeline reads the terminal.
    """

    streams: frozenset[int]
    controls: bool
    in_front: bool

    @property
    def output(self) -> int:
        """The stream that gets the output."""
        return min(self.streams - {0})


def shown_on_terminal() -> TerminalStreams | None:
    """Return which streams are the terminal; None if our output goes elsewhere."""
    ours = frozenset(filter(_controls_us, (0, 1, 2)))
    if ours & {1, 2}:
        others = {1, 2} - ours
        return TerminalStreams(
            ours,
            controls=True,
            in_front=0 in ours and not any(_has_reader(number) for number in others),
        )
    terminals = list(filter(os.isatty, (1, 2)))
    if not terminals:
        return None
    same = set()
    for number in terminals:
        if os.fstat(number).st_rdev == os.fstat(terminals[0]).st_rdev:
            same.add(number)
    return TerminalStreams(frozenset(same), controls=False, in_front=False)


def _controls_us(fd: int) -> bool:
    try:
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True


def _has_reader(fd: int) -> bool:
    """Return whether a descriptor leads to another process, such as ``| less``.

    That process may read the terminal itself.
    """
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


class OwnTerminal:
    """Open our controlling terminal again, with flags separate from the shell's descriptor.

    Args:
        reaper: restores the terminal if oomguard is killed.
        alone: whether no other member of our job prints on it.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, reaper: Reaper, *, alone: bool) -> None:
        self.fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._reaper = reaper
        self._alone = alone
        self._saved: Modes | None = None
        self._raw: Modes | None = None

    def is_foreground(self) -> bool:
        """Return whether our job is in the foreground, so that we may read and set the terminal."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return False

    def take(self, end: bytes) -> bytes:
        """Make it raw, also after another program has set it.

        Returns:
            The bytes typed before, with ``end`` for each Ctrl-D.
        """
        modes = read_modes(self.fd)
        if modes is None or (self._raw is not None and is_same(modes, self._raw)):
            return b""
        typed = typed_ahead(self.fd, modes, end)
        self._set(modes, raw(modes, adds_returns=not self._alone))
        return typed + keys_ahead(self.fd)

    def _set(self, saved: Modes, wanted: Modes) -> None:
        self._saved = saved
        self._raw = wanted
        self._reaper.back_up_terminal(self.fd, saved, wanted)
        set_modes(self.fd, wanted)

    def give_back(self) -> None:
        """Restore it, unless another program has set it since."""
        if self._raw is None or self._saved is None:
            return
        modes = read_modes(self.fd)
        if modes is not None and is_same(modes, self._raw):
            set_modes(self.fd, self._saved)
        self._saved = self._raw = None
        self._reaper.drop_terminal_backup()

    def close(self) -> None:
        """Restore it and close it."""
        self.give_back()
        os.close(self.fd)


def stop_ourselves(number: int, *, job_signals: SimpleQueue[int] | None) -> None:
    """Stop like a job of a shell, by the signal itself; return when we continue.

    Without a waiting shell it returns at once.

    Args:
        number: the signal that stopped the command.
        job_signals: the job signals that the signal thread received; None if our process group has
            got the signal already. Our own share among them has stopped no process.
    """
    is_ignored = signal.getsignal(number) is signal.SIG_IGN
    before = signal.signal(number, signal.SIG_DFL)
    masked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    try:
        # All at once, because a shell that sees the leader stop may continue the job before a
        # second signal stops us for good.
        if job_signals is None or is_ignored or _stop_group(number, job_signals) == number:
            # Sent to this thread, because the signal thread would take one for the process.
            signal.pthread_kill(threading.get_ident(), number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        signal.signal(number, before)


def _stop_group(number: int, job_signals: SimpleQueue[int]) -> int | None:
    """Stop our process group including us; return the first job signal that was read then.

    None if none came.
    """
    with contextlib.suppress(Empty):
        while True:
            job_signals.get_nowait()
    with contextlib.suppress(OSError):
        os.killpg(0, number)
    with contextlib.suppress(Empty):
        return job_signals.get(timeout=_OWN_SHARE_S)
    return None


_TYPED_BYTES: Final = 4096
# Output from before a stop is shown first, for at most this long.
_SHOW_S: Final = 1.0
# The command wants the terminal but is not in its foreground.
_WANTS_IT: Final = frozenset({signal.SIGTTIN, signal.SIGTTOU})


class TerminalJob:
    """Run one attempt on a terminal.

    Args:
        shown: which of our streams are the terminal.
        reaper: starts and continues the command.
        on_stop_keys: receives the signals of the user's stop keys, and the length of their echo.
        on_typed: called when something else was typed.

    Raises:
        OSError: if no pseudo-terminal is available.
    """

    def __init__(
        self,
        shown: TerminalStreams,
        reaper: Reaper,
        on_stop_keys: Callable[[list[int], int], None],
        on_typed: Callable[[], None],
    ) -> None:
        self._shown = shown
        self._reaper = reaper
        self._on_stop_keys = on_stop_keys
        self._on_typed = on_typed
        self._pseudo = PseudoTerminal(shown.output)
        self._own: OwnTerminal | None = None
        self._tee: Tee | None = None
        self._holds = False
        self._wants = shown.in_front
        self._stopped: int | None = None
        self._stopped_s = 0.0
        self._stops_itself = False
        self._job_signals: SimpleQueue[int] = SimpleQueue()
        self._was_continued = False
        self._typed = b""
        self._watched: set[int] = set()
        if shown.controls:
            try:
                self._own = OwnTerminal(reaper, alone=shown.in_front)
            except OSError:
                self._pseudo.close()
                raise

    def begin(self) -> ChildTerminal:
        """Take the terminal if the command is to have it; return the command's terminal."""
        own = self._own
        modes = read_modes(self._shown.output)
        pseudo = self._pseudo.modes
        if modes is not None and pseudo is not None:
            in_front = own is None or own.is_foreground()
            self._pseudo.begin_as(modes if in_front else for_background(pseudo, modes))
        self._holds = own is not None and own.is_foreground() and self._wants
        return ChildTerminal(
            self._pseudo.theirs, self._shown.streams, self._shown.controls, self._holds
        )

    def attach(self, tee: Tee) -> None:
        """Pass on input and output, because the command runs now."""
        self._pseudo.close_theirs()
        # A change of the window since the beginning has not reached the command.
        self._pseudo.copy_size()
        source = os.fdopen(os.dup(self._pseudo.ours), "rb", buffering=0)
        tee.add(
            source,
            self._shown.output,
            LineEnds(self._pseudo.ours, self._shown.output),
        )
        self._tee = tee
        PROGRESS.outputs[self._pseudo.ours] = self._shown.output
        if self._own is not None:
            PROGRESS.inputs[self._own.fd] = self._pseudo.ours
        tee.watch(self._reaper.fileno(), selectors.EVENT_READ, self._answered)
        self._watched.add(self._reaper.fileno())
        if self._holds and self._own is not None and self._own.is_foreground():
            self._take(self._own)
            self._resume_typing()

    def tick(self) -> None:
        """React to the command, the shell and the user."""
        own = self._own
        if own is None or self._tee is None or self._reaper.exit_status(0) is not None:
            return
        if (stopped := self._reaper.stopped_by()) is not None:
            self._stopped = stopped
            self._stopped_s = time.monotonic()
        in_front = own.is_foreground()
        if self._stopped is not None:
            is_shown = not (self._pseudo.has_output() or self._tee.has_pending())
            if is_shown or time.monotonic() - self._stopped_s > _SHOW_S:
                self._follow(own, self._stopped, in_front=in_front)
        elif self._holds and not in_front:
            self._let_go()
            self._reaper.resume(in_front=False)
        # ``fg`` of a running job sends no signal
        elif in_front and self._wants and not self._holds:
            self._hold(own)
        elif self._holds:
            # The program that ran while we were stopped may have set the terminal.
            if self._was_continued:
                self._was_continued = False
                self._take(own)
                self._pseudo.copy_size()
            self._resume_typing()

    def received(self, number: int, code: int | None, sender: int | None) -> bool:
        """Return whether a signal to us needs no forwarding: the terminal's, or our own stops."""
        if number == signal.SIGWINCH:
            is_other_size = self._pseudo.copy_size()
            return self._holds and (is_other_size or code == SI_KERNEL)
        if number == signal.SIGCONT:
            self._was_continued = True
            self._job_signals.put(number)
            was_ours = self._stops_itself
            self._stops_itself = False
            return was_ours
        if number in JOB_STOPS and sender == os.getpid():
            self._job_signals.put(number)
            return True
        return False

    def give_back(self) -> None:
        """Stop passing on; restore the user's terminal."""
        self._typed = b""
        self._let_go()
        self._tee = None

    def close(self) -> None:
        """Hang up the command's terminal."""
        self.give_back()
        self._pseudo.close()
        if self._own is not None:
            self._own.close()
            self._own = None

    def _follow(self, own: OwnTerminal, number: int, *, in_front: bool) -> None:
        """Stop like the command, so that the shell takes over; the command continues when we do."""
        if number in _WANTS_IT and in_front and not self._holds:
            # The command wants a terminal that no other member of our job uses.
            self._hold(own)
            return
        if self._holds or number in _WANTS_IT:
            job_signals = self._job_signals
        else:
            job_signals = None
        self._let_go()
        self._stops_itself = True
        # Some programs stop themselves with STOP. That would stop us even if no shell waits to
        # continue us.
        stop_ourselves(
            signal.SIGTSTP if number == signal.SIGSTOP else number, job_signals=job_signals
        )
        if own.is_foreground() and (self._wants or number in _WANTS_IT):
            self._hold(own)
        elif number not in _WANTS_IT:
            self._stopped = None
            self._reaper.resume(in_front=False)
        # Otherwise it stays stopped, because it would only ask again.

    def _hold(self, own: OwnTerminal) -> None:
        """Put the command in the foreground, and make the user's terminal raw."""
        if (modes := read_modes(own.fd)) is not None:
            self._pseudo.begin_as(modes)
        self._take(own)
        self._holds = self._wants = True
        self._stopped = None
        self._pseudo.copy_size()
        self._resume_typing()
        self._reaper.resume(in_front=True)

    def _let_go(self) -> None:
        self._holds = False
        if self._own is not None:
            self._own.give_back()
            self._unwatch(self._own.fd)

    def _answered(self) -> None:
        if self._reaper.exit_status(0) is not None:
            self._unwatch(self._reaper.fileno())
        else:
            self.tick()

    def _take(self, own: OwnTerminal) -> None:
        """Make the user's terminal raw; bytes typed before belong to the command."""
        self._typed += own.take(end_of_file(self._pseudo.modes))

    def _resume_typing(self) -> None:
        if self._typed and self._pseudo.ours not in self._watched:
            self._write()
        else:
            self._read_typed()

    def _read_typed(self) -> None:
        if self._own is not None and not self._typed:
            self._watch(self._own.fd, selectors.EVENT_READ, self._type)

    def _type(self) -> None:
        if self._own is None:
            return
        try:
            data = os.read(self._own.fd, _TYPED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            # The terminal hung up, or we are in the background by now.
            data = b""
        self._typed += data
        if data:
            self._write()
        else:
            self._unwatch(self._own.fd)

    def _write(self) -> None:
        """Type the waiting bytes; if the command's terminal is full, stop reading input."""
        modes = self._pseudo.modes
        for number in stop_keys(self._typed, modes):
            # The reaper has to know of the key before the command may end because of it.
            self._reaper.report_stop_key(number)
        try:
            count = os.write(self._pseudo.ours, self._typed)
        except BlockingIOError:
            count = 0
        except OSError:
            count = len(self._typed)
        written = self._typed[:count]
        self._typed = self._typed[count:]
        keys = stop_keys(written, modes)
        if written and not keys:
            self._on_typed()
        if keys:
            self._on_stop_keys(keys, len(keys) * echo_bytes(modes))
        if self._typed and self._own is not None:
            self._unwatch(self._own.fd)
            self._watch(self._pseudo.ours, selectors.EVENT_WRITE, self._write)
        else:
            self._unwatch(self._pseudo.ours)
            if self._holds:
                self._read_typed()

    def _watch(self, fd: int, events: int, serve: Callable[[], None]) -> None:
        if self._tee is not None and fd not in self._watched:
            self._watched.add(fd)
            self._tee.watch(fd, events, serve)

    def _unwatch(self, fd: int) -> None:
        if self._tee is not None and fd in self._watched:
            self._watched.discard(fd)
            # Once the copying has ended, nothing is watched any more.
            with contextlib.suppress(KeyError, ValueError, RuntimeError):
                self._tee.unwatch(fd)
