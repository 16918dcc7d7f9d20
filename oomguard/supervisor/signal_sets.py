"""Define sets of signals: forwarded, stopping, sent by a terminal, and found at the start."""

from __future__ import annotations

import signal
from typing import Final, NamedTuple

# Stops by a user; nothing is retried after them.
STOPS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
# Signals that stop a job of a shell. SIGSTOP stops only one process, as a debugger does.
JOB_STOPS: Final = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
# Signals that a terminal or a shell sends to the whole group of a job.
OF_TERMINAL: Final = JOB_STOPS | {signal.SIGINT, signal.SIGQUIT, signal.SIGCONT}
# Signals that the kernel never sends to one process alone: keys, window size, background reads.
BY_KEY: Final = JOB_STOPS | {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH}
# asm-generic/siginfo.h: the kernel sent it
SI_KERNEL: Final = 0x80
# Nobody can catch the first two. The third concerns our own children. A process causes the others
# by its own faults.
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
# Python ignores these from its start, so their original state is unknown.
IGNORED_BY_PYTHON: Final = frozenset({signal.SIGPIPE, signal.SIGXFSZ})


def forwardable_signals() -> frozenset[int]:
    """Return the signals that are forwarded to the command: all that another process may send."""
    return frozenset(int(number) for number in signal.valid_signals() - _NOT_HANDED_ON)


def ignored_signals() -> frozenset[int]:
    """Return the signals that were ignored when oomguard started (nohup, a script's ``&``)."""
    numbers = {int(number) for number in signal.valid_signals()} - IGNORED_BY_PYTHON
    found = []
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_IGN:
            found.append(number)
    return frozenset(found)


def waits_once(number: int) -> bool:
    """Return whether two pending signals of this number merge, as all except real-time ones do."""
    return number < signal.SIGRTMIN


class InitialSignals(NamedTuple):
    """Hold masked signals, ignored signals and closed standard streams as oomguard found them."""

    masked: frozenset[int]
    ignored: frozenset[int]
    closed: frozenset[int]

    def ignored_by(self, *, is_job: bool) -> frozenset[int]:
        """Return the signals that the command ignores.

        A job on its own terminal stops when it reads in the background, and is brought to the
        foreground. A shell's ``$(…)`` and a pane of tmux ignore that signal, so that the read would
        fail.
        """
        if is_job:
            return self.ignored - {signal.SIGTTIN}
        return self.ignored
