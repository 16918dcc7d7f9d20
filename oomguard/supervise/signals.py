"""Hand signals to oomguard on to the child; after one that asks to stop, nothing is remedied."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any, Final

RESEND_S: Final = 5.0
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT)


class Signals:
    """While entered, keep what arrives and forward it to the running child, if there is one.

    On a terminal the child shares oomguard's process group, so the terminal's Ctrl-C reaches it by itself and is not
    sent twice. It is where the child is still there ``RESEND_S`` later (``kill -INT`` of oomguard alone), and at a
    second Ctrl-C.

    Attributes:
        stopped_by: the first signal that asked to stop.
        stopped_at_s: when it came, on the monotonic clock.
        count: signals that asked to stop.
        stopped_between_runs: whether it came while no child was there to end of it.
    """

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self.stopped_at_s: float | None = None
        self.count = 0
        self.stopped_between_runs = False
        self._unsent: signal.Signals | None = None
        self._child_pid: int | None = None
        self._own_group = False
        self._before: dict[signal.Signals, Any] = {}

    def attach(self, pid: int | None, *, own_group: bool = False) -> None:
        """Name the child that signals go to (None: nobody), and forward to it a stop that came before."""
        self._child_pid, self._own_group = pid, own_group
        if pid is not None and self.stopped_by is not None:
            self._send(self.stopped_by)

    def __enter__(self) -> Signals:
        for number in (*_STOPS, *_PASSED):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and jobs of a script: ignored stays ignored
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received in _STOPS:
            self.count += 1
            if self.stopped_by is None:
                self.stopped_by, self.stopped_at_s = received, time.monotonic()
                self.stopped_between_runs = self._child_pid is None
            if received == signal.SIGINT and self.count == 1 and not self._own_group and terminal_foreground():
                self._unsent = received  # a terminal has sent it to the child already; kill -INT has not
                return
        self._send(received)

    def send_again(self) -> None:
        """Send a Ctrl-C that the terminal should have sent, where the child is still there a moment later."""
        if (
            self._unsent is not None
            and self.stopped_at_s is not None
            and time.monotonic() - self.stopped_at_s > RESEND_S
        ):
            unsent, self._unsent = self._unsent, None
            self._send(unsent)

    def _send(self, received: signal.Signals) -> None:
        if self._child_pid is None:
            return
        try:
            if self._own_group and received == signal.SIGINT:  # what a terminal would do
                os.killpg(self._child_pid, received)
            else:
                os.kill(self._child_pid, received)
        except ProcessLookupError:
            pass


def terminal_foreground() -> bool:
    """Return whether standard input is a terminal with oomguard as its foreground process group."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
