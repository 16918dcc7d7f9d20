"""Which processes of this machine have a file or a socket open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from oomguard.supervisor.tree import pids

_PROC: Final = Path("/proc")


def with_open(is_wanted: Callable[[str], bool]) -> set[int]:
    """Return the processes that have something open of which ``is_wanted`` holds, as far as they may be read.

    It is asked what a descriptor leads to: a path, or ``socket:[number]``.
    """
    return {pid for pid, target in _open_files() if is_wanted(target)}


def in_use(paths: Iterable[str]) -> set[str]:
    """Return those of some files that a process, as far as it may be read, has open or mapped."""
    wanted = set(paths)
    found = {target for _, target in _open_files() if target in wanted}
    for pid in pids():
        try:
            lines = (_PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        # Five fields stand before the path, which may hold spaces.
        found |= {path for line in lines if (path := line.split(None, 5)[-1].strip()) in wanted}
    return found


def _open_files() -> Iterator[tuple[int, str]]:
    for pid in pids():
        try:
            for link in (_PROC / str(pid) / "fd").iterdir():
                yield pid, str(link.readlink())
        except OSError:  # it has ended, or is another user's
            continue
