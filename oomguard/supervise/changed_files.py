"""Files that changed while a command ran, where it works and where its arguments point: who changed them is not known.

It finds what was opened, written and closed between two looks at the open files, and what was put in place by another name.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Iterator
from typing import Final

from oomguard.supervise.places import Places
from oomguard.supervise.written_files import MOST_ENTRIES, is_written
from oomguard.supervisor.open_files import Identity, identity, open_for_writing

LIMIT_S: Final = 2.0  # a network's file system answers slowly
_PROC: Final = "/proc"


def changed_files(places: Places, since_ns: int, known: Collection[Identity]) -> tuple[str, ...]:
    """Return the files that count, changed since then, and that the command could have written.

    Args:
        places: says which files count, and where to look: the files that the command names, its folder and the folders it
            names, and what lies below them.
        since_ns: when the command started.
        known: files left out: known already, or our own.
    """
    found: dict[Identity, str] = {}
    for name in _candidates(places):
        with contextlib.suppress(OSError):
            status = os.stat(name)
            if not is_written(status, since_ns) or identity(status) in known:
                continue
            path = os.path.realpath(name)
            is_theirs = path not in places.named and places.may_be_changed_by_others(path)
            if places.counts(path) and not is_theirs and os.access(path, os.W_OK):
                found[identity(status)] = path
    others = _open_now() if found else frozenset()
    return tuple(sorted(path for file, path in found.items() if file not in others))


def _candidates(places: Places) -> Iterator[str]:
    """Yield the paths to look at: of folders the nearest first, in all at most ``MOST_ENTRIES``, and for ``LIMIT_S``."""
    yield from (path for path in places.named if not os.path.isdir(path))
    roots = [path for path in places.named if os.path.isdir(path)]
    if places.folder is not None:
        roots.insert(0, places.folder)
    folders, seen, left = deque(roots), set(roots), MOST_ENTRIES
    end_s = time.monotonic() + LIMIT_S
    while folders and left > 0 and time.monotonic() < end_s:
        folder = folders.popleft()
        for entry in _entries(folder, left):
            left -= 1
            with contextlib.suppress(OSError):
                if not entry.is_dir():
                    yield entry.path
                    continue
                path = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                if path not in seen and _is_looked_into(path, folder, places):
                    seen.add(path)
                    folders.append(path)


def _is_looked_into(path: str, folder: str, places: Places) -> bool:
    return folder not in places.shared and not places.may_be_changed_by_others(path) and places.counts(path)


def _entries(folder: str, most: int) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for _, entry in zip(range(most), entries, strict=False):
            yield entry


def _open_now() -> frozenset[Identity]:
    """Return the files that any process holds open for writing: the command's have ended, so it is another that writes them."""
    found: set[Identity] = set()
    with contextlib.suppress(OSError):
        for pid in os.listdir(_PROC):
            if pid.isdigit():
                found.update(identity(status) for _, status in open_for_writing(int(pid)))
    return frozenset(found)
