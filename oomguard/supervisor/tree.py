"""The processes below one that we started, read from /proc, and how to end them: ask first, then
kill.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Final

KILL_WAIT_S: Final = 5.0
_POLL_S: Final = 0.02
_PROC: Final = "/proc"
_GONE: Final = b"ZX"  # has ended; its entry stays until its parent asks for its status


@functools.cache
def _is_ours(pid: int) -> bool:
    """Return whether /proc tells of our own PID namespace (``unshare --pid`` without
    ``--mount-proc`` leaves the outer one's).
    """
    try:
        return os.readlink(f"{_PROC}/self") == str(pid)
    except OSError:
        return False


def pids() -> list[int]:
    """Return all processes that may be seen; empty where /proc says nothing, or speaks of other
    processes.
    """
    if not _is_ours(os.getpid()):
        return []
    try:
        return [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    except OSError:
        return []


def descendants(root: int) -> list[int]:
    """Return the processes below ``root`` that have not ended, in the order of the tree; empty
    where /proc says nothing.
    """
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
    """Send a signal to every member of a process group but the caller, who may just get the same
    one from somebody else.

    The kernel keeps one of two that wait: the caller's own share would swallow the other.
    """
    sent = {os.getpid()}
    while found := {pid for pid in pids() if pid not in sent and _group(pid) == group}:
        for pid in found:
            send(pid, number)
        sent |= found  # and then what they forked meanwhile


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process, so that it acts on nothing but
    CONT and KILL.
    """
    return _state(pid)[0] == b"T"


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended and its status was not asked for."""
    return _state(pid)[0] == b"Z"


def children(pid: int) -> list[int]:
    """Return the processes whose parent is ``pid`` and that have not ended."""
    return [
        child
        for child in pids()
        for state, above in [_state(child)]
        if above == pid and state not in _GONE
    ]


def is_like(pid: int, other: int) -> bool:
    """Return whether a process runs the same command line as another, as a fork does that has
    become nothing else.
    """
    try:
        own = _entry(pid, "cmdline")
        return own == _entry(other, "cmdline") or own.startswith(b"group-witness")
    except OSError:
        return True


def remove_tree(folder: str) -> None:
    """Remove a folder and all in it, as far as that goes."""
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
    """Return the CPU time that a process took itself; 0 where it is gone."""
    try:
        fields = _entry(pid, "stat").rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def name_of(pid: int) -> str:
    """Return the name that ps shows for a process; empty where it is gone."""
    try:
        return _entry(pid, "comm").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def heeds(pid: int, number: int) -> bool:
    """Return whether a process acts on a signal, by its own handler or by ending; False where it
    ignores it or is gone.
    """
    try:
        text = _entry(pid, "status")
        return not int(text.partition(b"\nSigIgn:")[2].split(None, 1)[0], 16) >> number - 1 & 1
    except (OSError, IndexError, ValueError):
        return False


def parent(pid: int) -> int | None:
    """Return a process's parent; None where it is gone or its entry cannot be read."""
    state, number = _state(pid)
    if state:
        return number
    return None


def read_bytes(pid: int) -> int:
    """Return the bytes that a process has read, of files or from a cache; 0 where that
    is not told.
    """
    try:
        return int(_entry(pid, "io").partition(b"rchar: ")[2].split(None, 1)[0])
    except (OSError, IndexError, ValueError):
        return 0


def _entry(pid: int, name: str) -> bytes:
    """Return what /proc tells of a process; raises OSError where it is gone, or /proc speaks of
    other processes.
    """
    if not _is_ours(os.getpid()):
        raise ProcessLookupError(pid)
    return read_file(f"{_PROC}/{pid}/{name}")


def read_file(path: str) -> bytes:
    """Return what a small file holds; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while data := os.read(fd, 1 << 16):
            parts.append(data)
        return b"".join(parts)
    finally:
        os.close(fd)


def _state(pid: int) -> tuple[bytes, int]:
    """Return a process's state and its parent; an empty state where it is gone."""
    try:
        text = _entry(pid, "stat")
        state, parent = text[text.rindex(b")") + 2 :].split(b" ", 2)[
            :2
        ]  # the name before it may hold anything
        return state, int(parent)
    except (OSError, ValueError):
        return b"", 0


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def job_of(pid: int) -> int:
    """Return whom a shell signals that stops or continues a process as a job: its whole group where
    it leads one, else itself.
    """
    if _group(pid) == pid:
        return -pid
    return pid


def send(pid: int, number: int) -> bool:
    """Send a signal; return False where the process is gone or another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill(root: int, *, but: int | None = None) -> None:
    """Kill everything below ``root`` as it stands now, but one process."""
    for pid in descendants(root):
        if pid != but:
            send(pid, signal.SIGKILL)


def end(
    root: int,
    reap: Callable[[], bool],
    *,
    wait_s: float,
    spare_s: float = 0.0,
    hurried: Callable[[], bool] = lambda: False,
    but: int | None = None,
) -> None:
    """End everything below ``root``: after ``spare_s`` TERM to each process once, after ``wait_s``
    more KILL until none is left.

    Args:
        root: stays itself.
        reap: takes the status of children that ended; returns whether any child is left.
        wait_s: how long they have after TERM.
        spare_s: how long they have before it.
        hurried: asked while waiting; once true, they are killed at once.
        but: the process that stays too; ``reap`` does not count it.
    """
    asked: set[int] = set()
    began = time.monotonic()
    while reap() and time.monotonic() - began < spare_s and not hurried():
        time.sleep(_POLL_S)
    began = time.monotonic()
    while reap() and time.monotonic() - began < wait_s + KILL_WAIT_S:
        left = [pid for pid in descendants(root) if pid != but]
        if time.monotonic() - began >= wait_s or hurried():
            began = min(began, time.monotonic() - wait_s)
            for pid in left:
                send(pid, signal.SIGKILL)
        for pid in [pid for pid in left if pid not in asked]:
            send(pid, signal.SIGTERM)
            send(pid, signal.SIGCONT)  # a stopped process acts on TERM only then
            asked.add(pid)
        time.sleep(_POLL_S)
