"""Record which files the processes of a command have open for writing while it runs.

A file that is opened and closed between two checks is missed; side_effects.py finds some of those.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import Final

from oomguard.supervisor import tree
from oomguard.supervisor.tree import stand_back

# The first check is early, for short commands. Later checks take less than one percent of a core.
FIRST_S: Final = 0.05
LEAST_S: Final = 0.25
SHARE: Final = 0.008
# The kernel stamps files with this clock, a few milliseconds behind the other. Changes from now on
# have no earlier stamp.
_CLOCK_REALTIME_COARSE: Final = 5

Identity = tuple[int, int]


def now_ns() -> int:
    """Return the current time as the kernel stamps files, in nanoseconds."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def identity(status: os.stat_result) -> Identity:
    """Return the device and inode of a file, which a rename does not change."""
    return status.st_dev, status.st_ino


class OpenFiles:
    """Check in a thread which regular files are open for writing below a process.

    Args:
        root: the process; its own files are not checked.

    Attributes:
        cpu_s: CPU seconds that the checks took.
        looks: the number of checks.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._seen: dict[Identity, str] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oomguard-files", daemon=True)
        self.cpu_s = 0.0
        self.looks = 0

    def start(self) -> None:
        """Start checking."""
        self._thread.start()

    def stop(self) -> None:
        """Stop checking.

        A running check ends on its own, so that a successful run does not wait for it.
        """
        self._stopped.set()

    def look(self) -> float:
        """Check once; return the CPU seconds that it took."""
        began_s = time.thread_time()
        with self._lock:
            for pid in tree.descendants(self._root):
                if self._stopped.is_set():
                    # The run does not wait for an unfinished check.
                    break
                for path, status in open_for_writing(pid):
                    self._seen[identity(status)] = path
            took_s = time.thread_time() - began_s
            self.cpu_s += took_s
            self.looks += 1
        return took_s

    def seen(self) -> list[tuple[int, int, str]]:
        """Return the files that were open for writing: device, inode, path."""
        with self._lock:
            return [(*file, path) for file, path in self._seen.items()]

    def _run(self) -> None:
        wait_s = FIRST_S
        # An error in a check must not stop the run.
        with contextlib.suppress(BaseException):
            stand_back()
            while not self._stopped.wait(wait_s):
                # A machine with many processes is checked less often.
                wait_s = max(LEAST_S, self.look() / SHARE)


def open_for_writing(pid: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the named regular files that a process may write to; none without permission.

    Each system call lets the other threads run.
    """
    try:
        folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                # The link's own mode shows how the file was opened. The flags in fdinfo show no
                # more, but take three times as long.
                link = os.stat(number, dir_fd=folder, follow_symlinks=False)
                if not link.st_mode & stat.S_IWUSR or not (
                    path := os.readlink(number, dir_fd=folder)
                ).startswith("/"):
                    continue
                status = os.stat(number, dir_fd=folder)
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 0:
                    yield path, status
    except OSError:
        # The process has ended meanwhile.
        return
    finally:
        os.close(folder)
