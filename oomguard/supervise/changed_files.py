"""Files that changed while a command ran, where it works and where its arguments point: who changed them is not known.

It finds what was opened, written and closed between two looks at the open files, and what was put in place by another name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Final

from oomguard.supervise.places import Places
from oomguard.supervise.written_files import MOST_ENTRIES, Identity, identity, is_written, open_for_writing

_PROC: Final = "/proc"


def changed_files(places: Places, since_ns: int, known: Collection[Identity]) -> tuple[str, ...]:
    """Return the files that count, changed since then, and that the command could have written.

    Args:
        places: says which files count, and where to look: the files that the command names, the entries of its folder, of the
            folders it names, and of the folders in these that had an entry added, replaced or removed.
        since_ns: when the command started.
        known: files left out: known already, or our own.
    """
    found: dict[Identity, str] = {}
    for name in _candidates(places, since_ns):
        with contextlib.suppress(OSError):
            status, path = os.stat(name), os.path.realpath(name)
            if (
                is_written(status, since_ns)
                and identity(status) not in known
                and places.counts(path)
                and (path in places.named or not places.may_be_changed_by_others(path))
                and os.access(path, os.W_OK)
            ):
                found[identity(status)] = path
    others = _open_now() if found else frozenset()
    return tuple(sorted(path for file, path in found.items() if file not in others))


def _candidates(places: Places, since_ns: int) -> Iterator[str]:
    """Yield the paths to look at, in all at most ``MOST_ENTRIES`` of folders."""
    yield from (path for path in places.named if not os.path.isdir(path))
    folders = [path for path in places.named if os.path.isdir(path)]
    if places.folder is not None:
        folders.insert(0, places.folder)
    left = MOST_ENTRIES
    changed = []
    for folder in dict.fromkeys(folders):
        for entry in _entries(folder, left):
            left -= 1
            with contextlib.suppress(OSError):
                if not entry.is_dir():
                    yield entry.path
                elif (
                    folder not in places.shared
                    and entry.stat().st_ctime_ns >= since_ns
                    and not places.may_be_changed_by_others(entry.path)
                ):
                    changed.append(entry.path)
    for folder in changed:
        for entry in _entries(folder, left):
            left -= 1
            yield entry.path


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
