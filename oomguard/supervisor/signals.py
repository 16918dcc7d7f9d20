"""Receive signals and forward them to the command, and count the user's stop keys."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Final

from oomguard.supervisor import tree
from oomguard.supervisor.reaper import Reaper
from oomguard.supervisor.signal_sets import (
    BY_KEY,
    IGNORED_BY_PYTHON,
    SI_KERNEL,
    STOPS,
    InitialSignals,
    forwardable_signals,
    ignored_signals,
)
from oomguard.supervisor.terminal import TerminalJob


class StopKeyCounter:
    """Count stop keys in a row without an answer of the command.

    Args:
        printed: returns the number of bytes that the command has printed; more than the echo of a
            key is an answer.
    """

    def __init__(self, printed: Callable[[], int] = lambda: 0) -> None:
        self._printed = printed
        self._count = self._unanswered_bytes = 0

    def press(self, echo_bytes: int) -> int:
        """Count a key with ``echo_bytes`` of echo; return its number in the row."""
        printed_bytes = self._printed()
        if printed_bytes > self._unanswered_bytes:
            self._count = 0
        self._count += 1
        self._unanswered_bytes = printed_bytes + echo_bytes
        return self._count

    def forget(self) -> None:
        """Start a new row, because something else was typed."""
        self._count = 0


# After this many requests to stop, the command is killed, even within its grace period.
IMPATIENT_COUNT: Final = 3


class SignalForwarder:
    """Read every signal in a separate thread while entered, and forward it.

    The signals are blocked, not handled, because only then their sender is known, and no main loop
    has to react in time. Signals that were ignored at our start are read as well, because the
    command may have its own handler. Without its own terminal, the command shares oomguard's
    process group, so that signals to the group reach it directly. A sentinel in the group then
    knows whether the group or only oomguard got a signal.

    Args:
        closed: standard streams that were closed when oomguard started.

    Attributes:
        stopped_by: the first signal that asked to stop; None without one.
        stopped_at_s: when another process sent the first stop, on the monotonic clock; None without
            one. Keys do not count.
        count: the number of stops from other processes.
        presses: the number of stop keys.
        last_stop_s: when the last stop came, on the monotonic clock.
        stopped_between_runs: whether it came while no command was running.
        was_typed: whether a stop came from a key of the terminal.
        on_stop: called at the first stop by the reading thread, so it must not wait.
        reaper: starts the command, and stops it if oomguard is killed; exists while entered.
    """

    reaper: Reaper

    def __init__(self, closed: frozenset[int] = frozenset()) -> None:
        self.stopped_by: signal.Signals | None = None
        self.stopped_at_s: float | None = None
        self.count = self.presses = 0
        self.last_stop_s = 0.0
        self.stopped_between_runs = False
        self.was_typed = False
        self.on_stop: Callable[[], None] = lambda: None
        self._keys = StopKeyCounter()
        self._closed = closed
        self._runs = False
        self._terminal: TerminalJob | None = None
        self._grace_s = 0.0
        self._lock = threading.Lock()
        self._numbers: frozenset[int] = frozenset()
        self._before: dict[int, Any] = {}
        self._masked: set[int] = set()
        self._ignored: frozenset[int] = frozenset()
        self._strays: list[int] = []
        self._early: list[tuple[int, int | None, int | None]] = []
        self._leaving = False
        self._thread = threading.Thread(target=self._listen, name="oomguard-signals", daemon=True)

    def __enter__(self) -> SignalForwarder:
        # Blocked before the reaper is forked and the thread starts, so that no signal is lost
        # between.
        self._numbers = forwardable_signals()
        self._ignored = ignored_signals()
        self._masked = set(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)))
        self.reaper = Reaper(InitialSignals(frozenset(self._masked), self._ignored, self._closed))
        self._thread.start()
        self._stops_us(does=True)
        unchanged = IGNORED_BY_PYTHON | self._ignored | {signal.SIGTSTP}
        # A thread that was started earlier, with other masks, may still get these signals.
        for number in self._numbers - unchanged:
            # A handler in C (PYTHONFAULTHANDLER) reads as None and could not be restored.
            if signal.getsignal(number) is not None:
                self._before[number] = signal.signal(number, self._stray)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving = True
        self._wake()
        self._thread.join()
        # The tree ends before the handlers return, so that a late signal cannot end us first.
        self.reaper.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masked)

    def _stops_us(self, *, does: bool) -> None:
        """Let Ctrl-Z stop oomguard like any program, while no command is running."""
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK if does else signal.SIG_BLOCK, {signal.SIGTSTP} - self._masked
        )

    def attach(
        self,
        *,
        grace_s: float,
        printed: Callable[[], int] = lambda: 0,
        terminal: TerminalJob | None = None,
    ) -> None:
        """Forward signals from now on, because the command has started.

        Earlier signals go to it now.

        Args:
            grace_s: seconds between a stop and a kill; 0 kills at once.
            printed: returns the number of bytes that the command has printed.
            terminal: the command's own terminal; None without one.
        """
        self._stops_us(does=False)
        with self._lock:
            self._runs = True
            self._grace_s = grace_s
            self._terminal = terminal
            self._keys = StopKeyCounter(printed)
            if self.stopped_by is not None:
                self._send(int(self.stopped_by), None, None, is_stop=True)
            for early in self._early:
                self._send(*early, is_stop=False)
            self._early.clear()

    def detach(self) -> None:
        """Keep signals from now on, because the command has ended."""
        with self._lock:
            self._runs = False
            self._terminal = None
        self._stops_us(does=True)

    def typed(self, numbers: Sequence[int], echo_bytes: int) -> None:
        """Record stop keys of the command's own terminal, and send them to the rest of our job."""
        with self._lock:
            for number in numbers:
                tree.send_to_others(os.getpgrp(), number)
            self._key(numbers[0], echo_bytes)
            if self._runs and self._grace_s == 0:
                self.reaper.kill()

    def be_patient(self) -> None:
        """Restart the count of keys, because the user continues with the command.

        The stop still counts, so nothing is retried.
        """
        with self._lock:
            self._keys.forget()

    @property
    def is_urgent(self) -> bool:
        """Whether another process has asked to stop, so that nothing may delay the end."""
        return self.stopped_at_s is not None

    def note_delivery(self, *, reached: bool) -> None:
        """Record whether the command got the stop while it lived."""
        with self._lock:
            self.stopped_between_runs = self.stopped_by is not None and not reached

    def _stray(self, number: int, _frame: FrameType | None) -> None:
        self._strays.append(number)
        self._wake()

    def _wake(self) -> None:
        """Wake the thread by a signal from itself, which has no other effect."""
        if self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, min(self._numbers))

    def _listen(self) -> None:
        own = os.getpid()
        while not self._leaving:
            info = signal.sigwaitinfo(self._numbers)
            # After an error one signal is lost, but the thread reads the next one.
            with contextlib.suppress(BaseException):
                while self._strays:
                    self._received(self._strays.pop(0), None, None)
                # this one only wakes the thread
                if (info.si_pid, info.si_signo) != (own, min(self._numbers)):
                    self._received(info.si_signo, info.si_code, info.si_pid)

    def _received(self, number: int, code: int | None, sender: int | None) -> None:
        if number == signal.SIGCONT and sender == self.reaper.pid:
            # The reaper continued us, and has continued the command already.
            return
        if number == signal.SIGTSTP and not self._runs:
            # This thread took the signal that would have stopped the process, so stop it here.
            if number not in self._ignored | self._masked:
                os.kill(os.getpid(), signal.SIGSTOP)
            return
        with self._lock:
            if self._terminal is not None and self._terminal.received(number, code, sender):
                return
            is_stop = number in STOPS and (number not in self._ignored or self._is_heeded(number))
            if is_stop and code == SI_KERNEL and number in BY_KEY:
                self._key(number, 0)
            elif is_stop:
                self._stop(number)
            if self._runs:
                self._send(number, code, sender, is_stop=is_stop)
            elif not is_stop:
                self._early.append((number, code, sender))

    def _key(self, number: int, echo_bytes: int) -> None:
        self.was_typed = True
        self.presses += 1
        self._note(number)
        if self._keys.press(echo_bytes) >= IMPATIENT_COUNT:
            self.reaper.kill()

    def _stop(self, number: int) -> None:
        self.count += 1
        if self.stopped_at_s is None:
            self.stopped_at_s = time.monotonic()
        self._note(number)
        if self.count >= IMPATIENT_COUNT:
            self.reaper.kill()

    def _note(self, number: int) -> None:
        self.last_stop_s = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by = signal.Signals(number)
            self.stopped_between_runs = not self._runs
            self.on_stop()

    def _send(self, number: int, code: int | None, sender: int | None, *, is_stop: bool) -> None:
        if is_stop and self._grace_s == 0:
            self.reaper.kill()
        else:
            self.reaper.forward(number, code, sender)

    def _is_heeded(self, number: int) -> bool:
        """Return whether the command handles a signal that was ignored when oomguard started."""
        pid = self.reaper.command_pid
        return self._runs and pid is not None and tree.heeds(pid, number)
