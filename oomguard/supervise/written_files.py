"""Files that the processes of a command hold open for writing, looked for now and then while it runs.

What is opened and closed between two looks is missed; changed_files.py finds some of that.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import Final

from oomguard.supervise import tree
from oomguard.supervise.process_control import stand_back

# The first look is early, for commands that end soon; from then on the looks, and what wakes them, take less than one per
# cent of a core.
FIRST_S: Final = 0.05
LEAST_S: Final = 0.25
SHARE: Final = 0.008
# The kernel stamps files by this clock, a few milliseconds behind the other: what changes from now on has no earlier stamp.
_CLOCK_REALTIME_COARSE: Final = 5
MOST_ENTRIES: Final = 10_000

Identity = tuple[int, int]


def now_ns() -> int:
    """Return the time as the kernel stamps files."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def is_written(status: os.stat_result, since_ns: int) -> bool:
    """Return whether a file has bytes, and was written or put in its place since then.

    The time of change says it: a position in the file or its size may come from before, and the time of modification can be
    set to any other.
    """
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_ctime_ns >= since_ns


def identity(status: os.stat_result) -> Identity:
    """Return what a file keeps when it gets another name."""
    return status.st_dev, status.st_ino


class OpenFiles:
    """A thread that looks which regular files are open for writing below a process.

    Args:
        root: the process; its own files are not looked at.

    Attributes:
        cpu_s: time of a core that the looks took.
        looks: how many there were.
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
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more; a look under way ends by itself, and a run that ends well does not wait for it."""
        self._stopped.set()

    def look(self) -> float:
        """Look once; return the time of a core that it took."""
        began_s = time.thread_time()
        with self._lock:
            for pid in tree.descendants(self._root):
                if self._stopped.is_set():
                    break  # nobody waits for a look that is not finished
                for path, status in open_for_writing(pid):
                    self._seen[identity(status)] = path
            took_s = time.thread_time() - began_s
            self.cpu_s += took_s
            self.looks += 1
        return took_s

    def written(self, since_ns: int) -> dict[Identity, str]:
        """Return the files seen that were written since then and are still there, under the name that they have now."""
        with self._lock:
            seen = dict(self._seen)
        found = {}
        for file, path in seen.items():
            for name in (path, *_names_beside(path, file)):
                with contextlib.suppress(OSError):
                    status = os.stat(name)
                    if identity(status) == file and is_written(status, since_ns):
                        found[file] = name
                        break
        return found

    def _run(self) -> None:
        stand_back()
        wait_s = FIRST_S
        while not self._stopped.wait(wait_s):
            wait_s = max(LEAST_S, self.look() / SHARE)


def open_for_writing(pid: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files that a process may write to and that have a name; nothing where we may not look.

    Each system call lets the other threads go on.
    """
    try:
        folder = os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                # The link's own mode says how the file was opened; the flags in fdinfo say no more, for three times the time.
                link = os.stat(number, dir_fd=folder, follow_symlinks=False)
                if not link.st_mode & stat.S_IWUSR or not (path := os.readlink(number, dir_fd=folder)).startswith("/"):
                    continue
                status = os.stat(number, dir_fd=folder)
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 0:
                    yield path, status
    except OSError:  # the process is gone
        return
    finally:
        os.close(folder)


def _names_beside(path: str, file: Identity) -> Iterator[str]:
    """Yield the names that a file has in its folder: what is written under another name is then put in its place."""
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as entries:
        for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
            if entry.inode() == file[1]:
                yield entry.path
