"""The command as a job on the user's terminal: what is typed goes to it, it stops and goes on with us, as it would alone.

The user's terminal is raw exactly while the command is in the foreground of its own; what is printed then passes as it is.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from oomguard.supervise.lasting_modes import Lasting
from oomguard.supervise.line_ends import LineEnds
from oomguard.supervise.own_terminal import OwnTerminal, Shown, stop_ourselves
from oomguard.supervise.pseudo_terminal import PseudoTerminal
from oomguard.supervise.signal_sets import JOB_STOPS, SI_KERNEL
from oomguard.supervise.tee import Tee
from oomguard.supervise.terminal_modes import echo_bytes, for_background, read_modes, stop_keys
from oomguard.supervise.typed_ahead import end_of_file, may_type_back
from oomguard.supervise.watcher import Watcher
from oomguard.supervise.watcher_terminal import Given

_TYPED_BYTES: Final = 4096
# What was printed before a stop is shown first, for so long at most.
_SHOW_S: Final = 1.0
# The watcher lets go of a terminal just before it tells that the command has ended.
_TOLD_S: Final = 1.0
# The command wants the terminal and is not in its foreground.
_WANTS_IT: Final = frozenset({signal.SIGTTIN, signal.SIGTTOU})


class TerminalJob:
    """One attempt on a terminal.

    Args:
        shown: which of our streams are the terminal.
        watcher: starts and continues the command.
        on_stop_keys: is told the signals by which the user asks the command, at keys, to stop, and how much of them is shown.
        on_typed: is called when something else was typed.
        lasting: keeps what the command sets on its terminal, where it ends of itself.

    Raises:
        OSError: there is no pseudo-terminal.
    """

    def __init__(
        self,
        shown: Shown,
        watcher: Watcher,
        on_stop_keys: Callable[[list[int], int], None],
        on_typed: Callable[[], None],
        lasting: Lasting,
    ) -> None:
        self._shown, self._watcher = shown, watcher
        self._on_stop_keys, self._on_typed = on_stop_keys, on_typed
        self._lasting = lasting
        self._pseudo = PseudoTerminal(shown.output)
        self._own: OwnTerminal | None = None
        self._tee: Tee | None = None
        self._holds = False
        self._wants = shown.in_front
        self._stopped: int | None = None
        self._stopped_s = 0.0
        self._stops_itself = False
        self._told: SimpleQueue[int] = SimpleQueue()
        self._was_continued = False
        self._typed = b""
        self._watched: set[int] = set()
        if shown.controls:
            try:
                self._own = OwnTerminal(watcher, alone=shown.in_front)
            except OSError:
                self._pseudo.close()
                raise

    def begin(self) -> Given:
        """Take the terminal where the command is to have it; return what it is started on."""
        own = self._own
        self._lasting.note(None)
        modes, pseudo = read_modes(self._shown.output), self._pseudo.modes
        if modes is not None and pseudo is not None:
            in_front = own is None or own.is_foreground()
            self._pseudo.begin_as(modes if in_front else for_background(pseudo, modes))
        self._holds = own is not None and own.is_foreground() and self._wants
        if own is not None and self._holds and may_type_back():  # it is the shell's where the command cannot be started
            self._take(own, stands_still=True)
        return Given(self._pseudo.theirs, self._shown.streams, self._shown.controls, self._holds)

    def attach(self, tee: Tee) -> None:
        """Pass on what is typed and printed, now that the command runs."""
        self._pseudo.close_theirs()
        self._pseudo.copy_size()  # a change since the beginning went to nobody
        source = os.fdopen(os.dup(self._pseudo.ours), "rb", buffering=0)
        tee.add(source, self._shown.output, LineEnds(self._pseudo.ours, self._shown.output, self._print_as))
        self._tee = tee
        tee.watch(self._watcher.fileno(), selectors.EVENT_READ, self._answered)
        self._watched.add(self._watcher.fileno())
        if self._holds and self._own is not None and self._own.is_foreground():
            self._take(self._own)
            self._go_on_typing()

    def tick(self) -> None:
        """Do what the command, the shell or the user has made due."""
        own = self._own
        if own is None or self._tee is None or self._watcher.exit_status(0) is not None:
            return
        if (stopped := self._watcher.stopped_by()) is not None:
            self._stopped, self._stopped_s = stopped, time.monotonic()
        in_front = own.is_foreground()
        if self._stopped is not None:
            is_shown = not (self._pseudo.has_output() or self._tee.has_pending())
            if is_shown or time.monotonic() - self._stopped_s > _SHOW_S:
                self._follow(own, self._stopped, in_front=in_front)
        elif self._holds and not in_front:
            self._let_go()
            self._watcher.go_on(in_front=False)
        elif in_front and self._wants and not self._holds:  # ``fg`` of a job that runs tells nobody
            self._hold(own)
        elif self._holds:
            if self._was_continued:  # who had stopped us may have set the terminal
                self._was_continued = False
                self._take(own)
                self._pseudo.copy_size()
            self._go_on_typing()

    def received(self, number: int, code: int | None, sender: int | None) -> bool:
        """Return whether a signal that we got is done with: the terminal's own, and those of our own stops."""
        if number == signal.SIGWINCH:
            is_other_size = self._pseudo.copy_size()
            return self._holds and (is_other_size or code == SI_KERNEL)
        if number == signal.SIGCONT:
            self._was_continued = True
            self._told.put(number)
            was_ours, self._stops_itself = self._stops_itself, False
            return was_ours
        if number in JOB_STOPS and sender == os.getpid():
            self._told.put(number)
            return True
        return False

    def give_back(self) -> None:
        """Pass on nothing more; the user's terminal is as before, and has what the command did not read."""
        if self._own is not None and self._holds and self._own.is_foreground():
            status = self._watcher.exit_status(_TOLD_S)
            if status is not None and os.WIFEXITED(status):
                self._lasting.note(self._pseudo.was_set())
            self._own.type_back(self._pseudo.unread(self._own.end_of_file), self._typed)
            self._typed = b""
        self._let_go()
        self._tee = None

    def close(self) -> None:
        """Hang the command's terminal up."""
        self.give_back()
        self._pseudo.close()
        if self._own is not None:
            self._own.close()
            self._own = None

    def _follow(self, own: OwnTerminal, number: int, *, in_front: bool) -> None:
        """Stop as the command has, so that the shell takes over; it goes on when we do."""
        if number in _WANTS_IT and in_front and not self._holds:
            self._hold(own)  # it has asked for a terminal that nobody else of our job uses
            return
        told = self._told if self._holds or number in _WANTS_IT else None
        self._let_go()
        self._stops_itself = True
        # Some programs stop themselves by STOP. That one would stop us also where no shell waits to continue us.
        stop_ourselves(signal.SIGTSTP if number == signal.SIGSTOP else number, told=told)
        if own.is_foreground() and (self._wants or number in _WANTS_IT):
            self._hold(own)
        elif number not in _WANTS_IT:
            self._stopped = None
            self._watcher.go_on(in_front=False)
        # Else it stays stopped: it would only ask again.

    def _hold(self, own: OwnTerminal) -> None:
        """Have the command in the foreground, and the user's terminal raw."""
        if (modes := read_modes(own.fd)) is not None:
            self._pseudo.begin_as(modes)
        self._take(own, stands_still=self._stopped is not None)
        self._holds = self._wants = True
        self._stopped = None
        self._pseudo.copy_size()
        self._go_on_typing()
        self._watcher.go_on(in_front=True)

    def _print_as(self, adds_returns: bool) -> None:
        if self._holds and self._own is not None:
            self._own.print_as(adds_returns=adds_returns)

    def _let_go(self) -> None:
        self._holds = False
        if self._own is not None:
            self._own.give_back()
            self._unwatch(self._own.fd)

    def _answered(self) -> None:
        if self._watcher.exit_status(0) is not None:
            self._unwatch(self._watcher.fileno())
        else:
            self.tick()

    def _take(self, own: OwnTerminal, *, stands_still: bool = False) -> None:
        """Make the user's terminal raw; what was typed there before is the command's."""
        typed = own.take(end_of_file(self._pseudo.modes))
        count = self._pseudo.type_unseen(typed) if stands_still and not self._typed else 0
        self._typed += typed[count:]

    def _go_on_typing(self) -> None:
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
        except OSError:  # hung up, or in the background since
            data = b""
        self._typed += data
        if data:
            self._write()
        else:
            self._unwatch(self._own.fd)

    def _write(self) -> None:
        """Type what waits; what the command's terminal does not take waits, and nothing more is read."""
        modes = self._pseudo.modes
        for number in stop_keys(self._typed, modes):
            self._watcher.told_to_stop(number)  # before it may end of it
        try:
            count = os.write(self._pseudo.ours, self._typed)
        except BlockingIOError:
            count = 0
        except OSError:
            count = len(self._typed)
        written, self._typed = self._typed[:count], self._typed[count:]
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
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # the copying has ended
                self._tee.unwatch(fd)
