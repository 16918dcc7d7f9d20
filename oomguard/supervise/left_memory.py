"""Shared memory that a failed attempt left in /dev/shm: it is the host's memory until somebody removes it.

It is named and not removed. Nothing says who made a file there: Python's names (psm_) are drawn by chance, a neighbour's run
makes the same ones in the same minutes, and a segment that nobody has open just now may be one that is being handed over by
its name. What Python made is removed by its own resource tracker, also where its program was killed: little is ever left.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.facts import format_gib
from oomguard.supervise.holders import in_use

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - it is what is looked at
_BLOCK_BYTES: Final = 512  # of st_blocks, stat(2)
_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of shared memory; ``inode`` tells it from a later one of the same name."""

    name: str
    inode: int
    bytes: int


def segments(patterns: Iterable[str], folder: Path) -> frozenset[Segment]:
    """Return this user's files that are named so, with the memory that they take."""
    wanted, found = tuple(patterns), set()
    try:
        entries = list(os.scandir(folder)) if wanted else []
    except OSError:
        return frozenset()
    for entry in entries:
        if not any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in wanted):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if status.st_uid == os.geteuid() and entry.is_file(follow_symlinks=False):
            found.add(Segment(entry.name, status.st_ino, status.st_blocks * _BLOCK_BYTES))
    return frozenset(found)


def left_since(before: frozenset[Segment], patterns: Iterable[str], folder: Path) -> tuple[Segment, ...]:
    """Return the segments that were not there before and that no process has open or mapped, the largest first."""
    known = {(segment.name, segment.inode) for segment in before}
    new = [segment for segment in segments(patterns, folder) if (segment.name, segment.inode) not in known]
    used = in_use(str(folder / segment.name) for segment in new) if new else set()
    left = [segment for segment in new if str(folder / segment.name) not in used]
    return tuple(sorted(left, key=lambda segment: (-segment.bytes, segment.name)))


def told(left: tuple[Segment, ...], folder: Path) -> dict[str, str]:
    """Return what is said of them: what they take, and the command that removes them."""
    shown = left[:_SHOWN]
    more = f", {len(left) - len(shown)} more" if len(left) > len(shown) else ""
    return {
        "segments": ", ".join(f"{segment.name} ({format_gib(segment.bytes)})" for segment in shown) + more,
        "remove": shlex.join(["rm", *(str(folder / segment.name) for segment in shown)]),
    }
