"""Read the tree of processes below ours from /proc, adopt its orphans, and stop it.

Stopping means first TERM, then KILL. The last functions call Linux features that a process uses on
itself: it adopts orphans, dies with its parent, or sets its name and priority.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

KILL_WAIT_S: Final = 5.0
_POLL_S: Final = 0.02
# A look at /proc misses a process that is started after the list is read and whose parent ends
# before its own entry is read. So a tree is empty only after several looks in a row.
LOOKS: Final = 3
_PROC: Final = "/proc"
# ended; the entry stays until its parent reads its status
_GONE: Final = b"ZX"


@functools.cache
def _is_ours(pid: int) -> bool:
    """Return whether /proc shows our own PID namespace.

    ``unshare --pid`` without ``--mount-proc`` leaves the outer one.
    """
    try:
        return os.readlink(f"{_PROC}/self") == str(pid)
    except OSError:
        return False


def pids() -> list[int]:
    """Return all visible processes; empty if /proc is missing or shows another namespace."""
    if not _is_ours(os.getpid()):
        return []
    try:
        found = []
        for name in os.listdir(_PROC):
            if name.isdigit():
                found.append(int(name))
        return found
    except OSError:
        return []


def command_line(pid: int) -> tuple[str, ...]:
    """Return the words of a process's command line; empty if the process is gone."""
    try:
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return ()
    return tuple(map(os.fsdecode, filter(None, words)))


def descendants(root: int) -> list[int]:
    """Return the living processes below ``root``, in the order of the tree; empty without /proc."""
    children: dict[int, list[tuple[int, bool]]] = {}
    for pid in pids():
        state, parent = _state(pid)
        if state:
            children.setdefault(parent, []).append((pid, state in _GONE))
    found = []
    todo = [root]
    while todo:
        for pid, gone in children.get(todo.pop(), ()):
            todo.append(pid)
            if not gone:
                found.append(pid)
    return found


def send_to_others(group: int, number: int) -> None:
    """Send a signal to every member of a process group except the caller.

    The caller may be about to get the same signal from elsewhere. The kernel merges two pending
    ones, so the caller's own copy would hide the other.
    """
    sent = {os.getpid()}
    is_complete = False
    # one more look finds processes that the others forked meanwhile
    while not is_complete:
        is_complete = True
        for pid in pids():
            if pid not in sent and _group(pid) == group:
                send(pid, number)
                sent.add(pid)
                is_complete = False


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, so that it reacts only to CONT and KILL."""
    return _state(pid)[0] == b"T"


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended but its status was not read."""
    return _state(pid)[0] == b"Z"


def children(pid: int) -> list[int]:
    """Return the living children of ``pid``."""
    found = []
    for child in pids():
        state, above = _state(child)
        if above == pid and state not in _GONE:
            found.append(child)
    return found


def is_like(pid: int, other: int) -> bool:
    """Return whether two processes have the same command line, like a fork without exec."""
    try:
        own = _entry(pid, "cmdline")
        return own == _entry(other, "cmdline") or own.startswith(b"group-witness")
    except OSError:
        return True


def remove_tree(folder: str) -> None:
    """Remove a folder and its content, as far as possible."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                os.unlink(entry.path)
        except OSError:
            continue
    try:
        os.rmdir(folder)
    except OSError:
        return


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process itself; 0 if it is gone."""
    try:
        fields = _entry(pid, "stat").rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def name_of(pid: int) -> str:
    """Return the name that ps shows for a process; "" if it is gone."""
    try:
        return _entry(pid, "comm").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def heeds(pid: int, number: int) -> bool:
    """Return whether a process reacts to a signal; False if it ignores it or is gone."""
    try:
        text = _entry(pid, "status")
        return not int(text.partition(b"\nSigIgn:")[2].split(None, 1)[0], 16) >> number - 1 & 1
    except (OSError, IndexError, ValueError):
        return False


def is_busy_with(pid: int, number: int) -> bool:
    """Return whether a process runs, or sleeps although a signal waits for it."""
    try:
        text = _entry(pid, "status")
        state = text.partition(b"\nState:")[2].split(None, 1)[0]
        waiting = int(text.partition(b"\nShdPnd:")[2].split(None, 1)[0], 16)
    except (OSError, IndexError, ValueError):
        return False
    return state == b"R" or (state == b"S" and bool(waiting >> (number - 1) & 1))


def parent(pid: int) -> int | None:
    """Return a process's parent; None if it is gone or unreadable."""
    state, number = _state(pid)
    if state:
        return number
    return None


def read_bytes(pid: int) -> int:
    """Return the bytes that a process has read, from files or a cache; 0 if unknown."""
    try:
        return int(_entry(pid, "io").partition(b"rchar: ")[2].split(None, 1)[0])
    except (OSError, IndexError, ValueError):
        return 0


def _entry(pid: int, name: str) -> bytes:
    """Return a file of a process in /proc.

    Raises:
        OSError: if the process is gone, or /proc shows another namespace.
    """
    if not _is_ours(os.getpid()):
        raise ProcessLookupError(pid)
    return read_file(f"{_PROC}/{pid}/{name}")


def read_file(path: str) -> bytes:
    """Return the content of a small file.

    Raises:
        OSError: if it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while data := os.read(fd, 1 << 16):
            parts.append(data)
        return b"".join(parts)
    finally:
        os.close(fd)


def _state(pid: int) -> tuple[bytes, int]:
    """Return a process's state and its parent; an empty state if it is gone."""
    try:
        text = _entry(pid, "stat")
        # Search from the right, because the process's name before them may contain anything.
        state, parent = text[text.rindex(b")") + 2 :].split(b" ", 2)[:2]
        return state, int(parent)
    except (OSError, ValueError):
        return b"", 0


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def job_of(pid: int) -> int:
    """Return the target of job signals: -pid if the process leads a group, otherwise pid."""
    if _group(pid) == pid:
        return -pid
    return pid


def send(pid: int, number: int) -> bool:
    """Send a signal; return False if the process is gone or belongs to another user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill(root: int, *, exempt: int | None = None) -> None:
    """Kill every current process below ``root`` except ``exempt``."""
    for pid in descendants(root):
        if pid != exempt:
            send(pid, signal.SIGKILL)


def end(
    root: int,
    reap: Callable[[], bool],
    *,
    wait_s: float,
    spare_s: float = 0.0,
    is_urgent: Callable[[], bool] = lambda: False,
    exempt: int | None = None,
) -> None:
    """Stop everything below ``root``: TERM after ``spare_s``, and KILL after ``wait_s`` more.

    Args:
        root: the process above; it is not stopped.
        reap: reads the status of ended children; returns whether any child is left.
        wait_s: seconds between TERM and KILL.
        spare_s: seconds before TERM.
        is_urgent: polled while waiting; True kills at once.
        exempt: another process that is not stopped; ``reap`` does not count it.
    """
    asked: set[int] = set()
    began = time.monotonic()
    while reap() and time.monotonic() - began < spare_s and not is_urgent():
        time.sleep(_POLL_S)
    began = time.monotonic()
    while reap() and time.monotonic() - began < wait_s + KILL_WAIT_S:
        is_late = time.monotonic() - began >= wait_s or is_urgent()
        if is_late:
            began = min(began, time.monotonic() - wait_s)
        for pid in descendants(root):
            if pid == exempt:
                continue
            if is_late:
                send(pid, signal.SIGKILL)
            if pid not in asked:
                send(pid, signal.SIGTERM)
                # A stopped process reacts to TERM only after CONT.
                send(pid, signal.SIGCONT)
                asked.add(pid)
        time.sleep(_POLL_S)


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
        # The parent ended before the request, so its end would send no signal any more.
        os._exit(128 + signal.SIGKILL)


def set_name(name: str) -> None:
    """Set the name that ps and top show for this process."""
    _prctl(_PR_SET_NAME, name.encode())


def set_command_line(text: bytes) -> None:
    """Set the command line that ps shows and ``pkill -f`` matches, if /proc shows its address."""
    try:
        fields = read_file("/proc/self/stat").rpartition(b")")[2].split()
        # arg_start and arg_end are the fields 48 and 49 (proc_pid_stat(5)); the first two are gone
        start = int(fields[48 - 3])
        end = int(fields[49 - 3])
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
