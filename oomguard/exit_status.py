"""The exit status of a command in words: above 128 a shell, a container and systemd mean the signal that ended it."""

from __future__ import annotations

import signal
from typing import Final

_OF_SIGNALS: Final = 128


def status_in_words(status: int) -> str:
    """Return "exit status 3", or "exit status 137, signal 9 (KILL)" where a signal ended the command."""
    try:
        name = signal.Signals(status - _OF_SIGNALS).name.removeprefix("SIG")
    except ValueError:
        return f"exit status {status}"
    return f"exit status {status}, signal {status - _OF_SIGNALS} ({name})"
