"""The files that a pattern names: as ``glob`` has it, but no link leads ``**`` back into a folder that it came through."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

_ANY_DEPTH = "**"


def matching(pattern: str) -> list[str]:
    """Return the paths that match, sorted, each as the pattern is written: ``./a`` stays ``./a``."""
    return sorted(set(_matching(pattern)))


def _matching(pattern: str) -> Iterator[str]:
    parts = pattern.split(os.sep)  # noqa: PTH206 - ./ and // stay
    if _ANY_DEPTH not in parts:
        yield from glob.iglob(pattern)  # noqa: PTH207 - the pattern is a whole path, of this folder or of the root
        return
    at = parts.index(_ANY_DEPTH)
    above, below = os.sep.join(parts[:at]), os.sep.join(parts[at + 1 :]) or "*"  # noqa: PTH118 - a pattern
    if at == 1 and not parts[0]:
        above = os.sep
    for start in glob.iglob(above) if above else ("",):  # noqa: PTH207 - as above
        for folder in _folders_from(start, frozenset()):
            yield from _matching(os.path.join(glob.escape(folder), below))  # noqa: PTH118 - as it was written


def _folders_from(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield a folder and those below it, hidden ones left out; a link to a folder above it is a way back and not taken."""
    try:
        about = os.stat(folder or os.curdir)  # noqa: PTH116 - as below
        children = sorted(os.scandir(folder or os.curdir), key=lambda child: child.name)
    except (OSError, ValueError):
        return
    own = (about.st_dev, about.st_ino)
    if own in above:
        return
    yield folder
    for child in children:
        if not child.name.startswith(".") and child.is_dir():
            yield from _folders_from(os.path.join(folder, child.name), above | {own})  # noqa: PTH118 - "" stays ""
