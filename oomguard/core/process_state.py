"""Which process a user takes for oomguard: under ``oomguard run`` it is the supervisor, and not the
process that asks.
"""

from __future__ import annotations

import os
import signal
from typing import Final

# The switch that turns everything off: ``OOMGUARD_DISABLE=1``.

_ON: Final = frozenset({"1", "true", "yes", "on"})


def disabled() -> bool:
    """Whether the user turned oomguard off; ``0``, empty and unset leave it on."""
    return os.environ.get("OOMGUARD_DISABLE", "").strip().lower() in _ON


# The exit status of a command in words: above 128 a shell, a container and systemd mean the signal
# that ended it.

_OF_SIGNALS: Final = 128


def status_in_words(status: int) -> str:
    """Return "exit status 3", or "exit status 137, signal 9 (KILL)" where a signal ended the
    command.
    """
    try:
        name = signal.Signals(status - _OF_SIGNALS).name.removeprefix("SIG")
    except ValueError:
        return f"exit status {status}"
    return f"exit status {status}, signal {status - _OF_SIGNALS} ({name})"


_pid: Final[list[int]] = []


def pid_of_run() -> int:
    """Return the process that a user would look for, or end."""
    if _pid:
        return _pid[-1]
    return os.getpid()


def set_pid_of_run(pid: int) -> None:
    """Note that this process works for another one."""
    _pid[:] = [pid]
