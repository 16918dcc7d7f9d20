"""Stops at a key of the terminal: its user repeats them, and looks at what the command answers."""

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
from oomguard.supervisor.reaper import Watcher
from oomguard.supervisor.signal_sets import (
    BY_KEY,
    IGNORED_BY_PYTHON,
    SI_KERNEL,
    STOPS,
    Before,
    handed_on,
    ignored,
)
from oomguard.supervisor.terminal import TerminalJob
from oomguard.supervisor.terminal_modes import Lasting


class Keys:
    """How often such a key was pressed in a row without an answer.

    Args:
        printed: returns how many bytes the command has printed; more than the echo of a key is an
            answer.
    """

    def __init__(self, printed: Callable[[], int] = lambda: 0) -> None:
        self._printed = printed
        self._count = self._unanswered_bytes = 0

    def press(self, echo_bytes: int) -> int:
        """Count a key of which the terminal shows so much; return which one in a row it is."""
        printed_bytes = self._printed()
        if printed_bytes > self._unanswered_bytes:
            self._count = 0
        self._count += 1
        self._unanswered_bytes = printed_bytes + echo_bytes
        return self._count

    def forget(self) -> None:
        """Begin anew: something else was typed."""
        self._count = 0


# So many requests to stop end the patience, however long the grace.
IMPATIENT_COUNT: Final = 3


class SignalForwarder:
    """While entered, every signal that another process sends is read by a thread of its own and
    handed on.

    They are blocked rather than handled: only so is told who sent them, and that needs no main loop
    that comes round in time. Those that are ignored at our start are read as well: blocked ones
    wait, and the command may have a handler of its own. Without a terminal of its own the command
    shares oomguard's process group, so that what is sent to the group reaches it and what it has
    started by itself; a witness, a member too, knows whether the group had a signal or oomguard
    alone.

    Args:
        closed: standard streams that oomguard was started without.

    Attributes:
        stopped_by: the first signal that asked to stop.
        stopped_at_s: when another process sent one first, on the monotonic clock. A key is its
            user's to repeat.
        count: stops that another process sent.
        presses: stops at a key of the terminal.
        last_stop_s: when the last stop came, on the monotonic clock.
        stopped_between_runs: whether it came while no command was there to end of it.
        was_typed: whether a stop came from a key of the terminal.
        lasting: what the command sets on its terminal stays; set when all is told.
        on_stop: is called with the first of these stops, by the thread that reads it, so it must
            not wait.
        watcher: starts the command, and ends it where oomguard is killed; there while entered.
    """

    watcher: Watcher

    def __init__(self, closed: frozenset[int] = frozenset()) -> None:
        self.stopped_by: signal.Signals | None = None
        self.stopped_at_s: float | None = None
        self.count = self.presses = 0
        self.last_stop_s = 0.0
        self.stopped_between_runs = False
        self.was_typed = False
        self.on_stop: Callable[[], None] = lambda: None
        self.lasting = Lasting()
        self._keys = Keys()
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
        self._numbers = handed_on()
        self._ignored = ignored()
        self._masked = {
            int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        }
        self.watcher = Watcher(Before(frozenset(self._masked), self._ignored, self._closed))
        self._thread.start()
        self._stops_us(does=True)
        left_alone = IGNORED_BY_PYTHON | self._ignored | {signal.SIGTSTP}
        for number in (
            self._numbers - left_alone
        ):  # for a thread that somebody started before, unmasked
            if (
                signal.getsignal(number) is not None
            ):  # a handler in C (PYTHONFAULTHANDLER) could not be put back
                self._before[number] = signal.signal(number, self._stray)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lasting.apply()
        self._leaving = True
        self._wake()
        self._thread.join()
        self.watcher.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masked)

    def _stops_us(self, *, does: bool) -> None:
        """Let Ctrl-Z stop us as any program, while no command is there that it would stop first."""
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
        """Hand signals on from here on, as the command has started; what came before goes to it
        now.

        Args:
            grace_s: 0 where a stop kills and is not handed on.
            printed: returns how many bytes the command has printed.
            terminal: the command's own.
        """
        self._stops_us(does=False)
        with self._lock:
            self._runs = True
            self._grace_s = grace_s
            self._terminal = terminal
            self._keys = Keys(printed)
            if self.stopped_by is not None:
                self._send(int(self.stopped_by), None, None, is_stop=True)
            for early in self._early:
                self._send(*early, is_stop=False)
            self._early.clear()

    def detach(self) -> None:
        """Keep signals from here on: the command has ended."""
        with self._lock:
            self._runs = False
            self._terminal = None
        self._stops_us(does=True)

    def typed(self, numbers: Sequence[int], echo_bytes: int) -> None:
        """Note stops that the command had at keys of its own terminal, at once; the others of our
        job have them too.
        """
        with self._lock:
            for number in numbers:
                tree.send_to_others(os.getpgrp(), number)
            self._key(numbers[0], echo_bytes)
            if self._runs and self._grace_s == 0:
                self.watcher.kill()

    def be_patient(self) -> None:
        """Count the keys anew: their user goes on with the command. Nothing is remedied all the
        same.
        """
        with self._lock:
            self._keys.forget()

    @property
    def hurries(self) -> bool:
        """Whether another process has asked to stop: nothing holds up the end."""
        return self.stopped_at_s is not None

    def was_told(self, *, told: bool) -> None:
        """Say whether the command was told to stop while it lived, where a stop came at all."""
        with self._lock:
            self.stopped_between_runs = self.stopped_by is not None and not told

    def _stray(self, number: int, _frame: FrameType | None) -> None:
        self._strays.append(number)
        self._wake()

    def _wake(self) -> None:
        """Wake the thread by a signal of its own, which says nothing but that."""
        if self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, min(self._numbers))

    def _listen(self) -> None:
        own = os.getpid()
        while not self._leaving:
            info = signal.sigwaitinfo(self._numbers)
            with contextlib.suppress(BaseException):  # one signal is lost, and the next one is read
                while self._strays:
                    self._received(self._strays.pop(0), None, None)
                if (info.si_pid, info.si_signo) != (own, min(self._numbers)):  # which only wakes us
                    self._received(info.si_signo, info.si_code, info.si_pid)

    def _received(self, number: int, code: int | None, sender: int | None) -> None:
        if number == signal.SIGCONT and sender == self.watcher.pid:
            return  # the command goes on already; this one was for us
        if number == signal.SIGTSTP and not self._runs:
            if (
                number not in self._ignored | self._masked
            ):  # this thread took what would have stopped the other
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
            self.watcher.kill()

    def _stop(self, number: int) -> None:
        self.count += 1
        if self.stopped_at_s is None:
            self.stopped_at_s = time.monotonic()
        self._note(number)
        if self.count >= IMPATIENT_COUNT:
            self.watcher.kill()

    def _note(self, number: int) -> None:
        self.last_stop_s = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by = signal.Signals(number)
            self.stopped_between_runs = not self._runs
            self.on_stop()

    def _send(self, number: int, code: int | None, sender: int | None, *, is_stop: bool) -> None:
        if is_stop and self._grace_s == 0:
            self.watcher.kill()
        else:
            self.watcher.forward(number, code, sender)

    def _is_heeded(self, number: int) -> bool:
        """Whether the command has made a signal its own that was ignored when we started."""
        pid = self.watcher.command_pid
        return self._runs and pid is not None and tree.heeds(pid, number)
