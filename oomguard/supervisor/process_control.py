"""Call Linux features for a supervisor: adopt orphans, die with the parent, set names."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import Any, Final

from oomguard.supervisor.tree import read_file

_NICE: Final = 10
# linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36


def become_subreaper() -> bool:
    """Adopt the orphans below this process, so that none outlives it.

    False if the system cannot do that (not Linux).
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its single-threaded ``parent`` ends.

    If the parent has ended already, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def set_name(name: str) -> None:
    """Set the name that ps and top show for this process."""
    _prctl(_PR_SET_NAME, name.encode())


def set_command_line(text: bytes) -> None:
    """Set the command line that ps shows and ``pkill -f`` matches, if /proc shows its address."""
    try:
        fields = read_file("/proc/self/stat").rpartition(b")")[2].split()
        start, end = (
            int(fields[number - 3]) for number in (48, 49)
        )  # arg_start, arg_end: proc_pid_stat(5)
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text[: end - start - 1], min(len(text), end - start - 1))


def stand_back() -> None:
    """Lower the priority of this thread, because the command and the copying come first."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _prctl(option: int, value: int | bytes) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    argument: Any = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False
