"""Shared memory that a failed attempt left in /dev/shm: it is the host's memory until somebody removes it.

It is named and not removed. Nothing says who made a file there: Python's names (psm_) are drawn by chance, a neighbour's run
makes the same ones in the same minutes, and a segment that nobody has open just now may be one that is being handed over by
its name. What Python made is removed by its own resource tracker, also where its program was killed: little is ever left.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from oomguard.facts import format_gib

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - it is what is looked at
_BLOCK_BYTES: Final = 512  # of st_blocks, stat(2)
_SHOWN: Final = 8


class Segment(NamedTuple):
    """A file of shared memory; ``inode`` tells it from a later one of the same name."""

    name: str
    inode: int
    bytes: int
    made_at: float


def known(patterns: Iterable[str], folder: Path, before: float | None = None) -> frozenset[tuple[str, int]]:
    """Return this user's files that are named so and were made before then, by name and inode; None: up to now."""
    found = (segment for segment in _segments(patterns, folder) if before is None or segment.made_at < before)
    return frozenset((segment.name, segment.inode) for segment in found)


def left_since(before: frozenset[tuple[str, int]], patterns: Iterable[str], folder: Path) -> tuple[Segment, ...]:
    """Return the segments that were not known before and that no process has open or mapped, the largest first."""
    new = [segment for segment in _segments(patterns, folder) if (segment.name, segment.inode) not in before]
    if not new:
        return ()
    from oomguard.supervise.holders import in_use

    used = in_use(str(folder / segment.name) for segment in new)
    left = [segment for segment in new if str(folder / segment.name) not in used]
    return tuple(sorted(left, key=lambda segment: (-segment.bytes, segment.name)))


def _segments(patterns: Iterable[str], folder: Path) -> Iterator[Segment]:
    wanted = tuple(patterns)
    try:
        entries = list(os.scandir(folder)) if wanted else []
    except OSError:
        return
    for entry in entries:
        if not any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in wanted):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
            yield Segment(entry.name, status.st_ino, status.st_blocks * _BLOCK_BYTES, status.st_ctime)


def told(left: tuple[Segment, ...], folder: Path) -> dict[str, str]:
    """Return the text about them: what they take, and the command that removes them."""
    shown = left[:_SHOWN]
    more = f", {len(left) - len(shown)} more" if len(left) > len(shown) else ""
    return {
        "segments": ", ".join(f"{segment.name} ({format_gib(segment.bytes)})" for segment in shown) + more,
        "remove": shlex.join(["rm", *(str(folder / segment.name) for segment in shown)]),
    }
