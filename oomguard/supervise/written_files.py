"""Files that the processes of a command had open for writing: which of them were written, and are still there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Final

from oomguard.supervisor.open_files import Identity, identity

MOST_ENTRIES: Final = 10_000


def is_written(status: os.stat_result, since_ns: int) -> bool:
    """Return whether a file has bytes, and was written or put in its place since then.

    The time of change says it: a position in the file or its size may come from before, and the time of modification can be
    set to any other.
    """
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_ctime_ns >= since_ns


def written_since(seen: Iterable[tuple[int, int, str]], since_ns: int) -> dict[Identity, str]:
    """Return the files seen that were written since then and are still there, under the name that they have now."""
    found = {}
    for device, inode, path in seen:
        file = (device, inode)
        for name in (path, *_names_beside(path, file)):
            with contextlib.suppress(OSError):
                status = os.stat(name)
                if identity(status) == file and is_written(status, since_ns):
                    found[file] = name
                    break
    return found


def _names_beside(path: str, file: Identity) -> Iterator[str]:
    """Yield the names that a file has in its folder: what is written under another name is then put in its place."""
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as entries:
        for _, entry in zip(range(MOST_ENTRIES), entries, strict=False):
            if entry.inode() == file[1]:
                yield entry.path
