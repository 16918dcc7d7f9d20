"""Which signals mean what: handed on, asking to stop, sent by a terminal to a whole process group;
and those found at the start.
"""

from __future__ import annotations

import signal
from typing import Final, NamedTuple

# A user's stop: nothing is remedied after it.
STOPS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
# What stops a job, in a shell's sense, and not only one process (SIGSTOP: a debugger's, nobody
# catches it).
JOB_STOPS: Final = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
# What a terminal or a shell sends to the whole group of a job.
OF_TERMINAL: Final = JOB_STOPS | {signal.SIGINT, signal.SIGQUIT, signal.SIGCONT}
# What the kernel sends to no process alone: at a key, at another size of the window, to a
# background job that reads.
BY_KEY: Final = JOB_STOPS | {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH}
SI_KERNEL: Final = 0x80  # asm-generic/siginfo.h: no process sent it
# Nobody catches the first two; the third is about our own children; the others a process brings on
# itself by a fault.
_NOT_HANDED_ON: Final = frozenset(
    {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGCHLD,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)
# Python ignores these from its start, so that nobody can tell whether they were ignored before.
IGNORED_BY_PYTHON: Final = frozenset({signal.SIGPIPE, signal.SIGXFSZ})


def handed_on() -> frozenset[int]:
    """Return the signals that go on to the command: all that another process may send."""
    return frozenset(int(number) for number in signal.valid_signals() - _NOT_HANDED_ON)


def ignored() -> frozenset[int]:
    """Return the signals that were ignored when oomguard started (nohup, a script's ``&``)."""
    numbers = {int(number) for number in signal.valid_signals()} - IGNORED_BY_PYTHON
    return frozenset(number for number in numbers if signal.getsignal(number) is signal.SIG_IGN)


def waits_once(number: int) -> bool:
    """Return whether two of a signal that wait at the same time are one to a process: all are but
    real-time signals.
    """
    return number < signal.SIGRTMIN


class Before(NamedTuple):
    """Masked and ignored signals, and closed standard streams, as oomguard found them."""

    masked: frozenset[int]
    ignored: frozenset[int]
    closed: frozenset[int]

    def ignored_by(self, *, is_job: bool) -> frozenset[int]:
        """Return the signals that the command ignores.

        A job of a terminal of its own stops where it reads from behind, and is brought to the
        front. A shell's ``$(…)`` and a pane of tmux ignore that signal, and the read would fail.
        """
        if is_job:
            return self.ignored - {signal.SIGTTIN}
        return self.ignored
