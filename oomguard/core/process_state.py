"""Hold the state of this process: the off switch and the process that the user started."""

from __future__ import annotations

import os
import signal
from typing import Final

# ``OOMGUARD_DISABLE=1`` turns everything off.

_ON: Final = frozenset({"1", "true", "yes", "on"})


def disabled() -> bool:
    """Return whether the user turned oomguard off; ``0``, empty and unset leave it on."""
    return os.environ.get("OOMGUARD_DISABLE", "").strip().lower() in _ON


# Above this number, a shell, a container and systemd mean the signal that ended the command.

_SIGNAL_BASE: Final = 128


def status_in_words(status: int) -> str:
    """Describe an exit status in words.

    >>> status_in_words(137)
    'exit status 137, signal 9 (KILL)'
    """
    try:
        name = signal.Signals(status - _SIGNAL_BASE).name.removeprefix("SIG")
    except ValueError:
        return f"exit status {status}"
    return f"exit status {status}, signal {status - _SIGNAL_BASE} ({name})"


_pid: Final[list[int]] = []


def pid_of_run() -> int:
    """Return the process id that the user would look for or stop.

    Under ``oomguard run`` this is the supervisor, not the process that calls this function.
    """
    if _pid:
        return _pid[-1]
    return os.getpid()


def set_pid_of_run(pid: int) -> None:
    """Record the id of the process that this one works for."""
    _pid[:] = [pid]
