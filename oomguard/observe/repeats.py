"""Lines that say the same again and again: after the first ones they are counted and not read.

A server that catches each failure prints it a hundred thousand times, and each costs as much to read as the first.
"""

from __future__ import annotations

from typing import Final

# Of each shape so many lines are read: hundreds of processes, or restarts, differ in their numbers alone. Of a run of repeats behind
# them so many are read at its beginning and at its end.
KEPT: Final = 600
EDGE: Final = 10
LEAST_RUN: Final = 120
_MOST_SHAPES: Final = 20_000
# Numbers and identifiers differ from one repeat to the next.
_DIGITS: Final = b"0123456789abcdef"
_SHAPE: Final = bytes(ord("0") if byte in _DIGITS else byte for byte in range(256))


class Repeats:
    """Knows the shapes of the lines so far; one for an input.

    Attributes:
        are_many: whether the part before had stretches of them.
    """

    def __init__(self) -> None:
        self.are_many = False
        self._counts: dict[bytes, int] = {}

    def dropped(self, data: bytes) -> list[tuple[int, int]]:
        """Return the stretches of some whole lines, as offsets of their beginning and end, that only repeat what came before."""
        counts, found = self._counts, []
        if len(counts) > _MOST_SHAPES:
            counts.clear()
        starts = [0]
        begin, number, at = -1, 0, 0
        for line in data.translate(_SHAPE).split(b"\n"):
            at += len(line) + 1
            starts.append(at)
            seen = counts[line] = counts.get(line, 0) + 1
            if seen <= KEPT:
                if 0 <= begin < number - LEAST_RUN:
                    found.append((starts[begin + EDGE], starts[number - EDGE]))
                begin = -1
            elif begin < 0:
                begin = number
            number += 1
        if 0 <= begin < number - LEAST_RUN:
            found.append((starts[begin + EDGE], starts[number - EDGE]))
        return found


def without(regions: list[tuple[int, int]], dropped: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is left of regions, sorted as the stretches are, that are dropped from them."""
    left = []
    rest = iter([*dropped, (1 << 62, 1 << 62)])
    start, stop = next(rest)
    for begin, end in regions:
        at = begin
        while at < end:
            while stop <= at:
                start, stop = next(rest)
            if start > at:
                left.append((at, min(start, end)))
            at = max(at, min(start, end)) if start > at else min(stop, end)
    return left
