"""Processes of this machine as a user is shown them: each by its id and its command, the secrets in
it masked.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from oomguard.report.redact import mask_command

_PROC: Final = Path("/proc")
_SHOWN_CHARS: Final = 120
_SHOWN_HOLDERS: Final = 3


def named(pid: int) -> str:
    """Return a process's id and its command, the secrets in it masked."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        name = (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return f"pid {pid}"
    command = (
        shlex.join(mask_command([word.decode(errors="replace") for word in words if word]))
        or f"[{name}]"
    )
    return (
        f"pid {pid} ({command if len(command) <= _SHOWN_CHARS else command[:_SHOWN_CHARS] + '…'})"
    )


def listed(numbers: Sequence[int], has: Callable[[int], str] = lambda _: "") -> str:
    """Return several processes named, the first few of them, each with what it has."""
    shown = [f"{named(pid)}{has(pid)}" for pid in numbers[:_SHOWN_HOLDERS]]
    more = len(numbers) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])
