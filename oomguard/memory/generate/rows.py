"""How many rows of a call fit: by a trace of the call itself, or by the rows that have run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

# Questions to a trace: each costs about as long as a few steps of the call on a CPU. An affine need takes two.
_MOST_QUESTIONS: Final = 10
# Numbers that are looked at by estimates above one that fits, and those of them that are traced until one does.
_MOST_ESTIMATES, _MOST_CONFIRMED = 24, 2
_MOST_GROWTH: Final = 8
# Rows that did not fit where others had said that they do: by how much they missed is not known.
_BELOW_FAILED_RATIO: Final = 0.9


class CallTrace(Protocol):
    """A call that tells what other numbers of its rows would need."""

    def need_bytes(self, rows: int, room_bytes: int | None = None) -> int | None:
        """Return the bytes that ``rows`` rows take beyond what is alive before them; None where that cannot be told.

        Where they do not fit in ``room_bytes`` only for the allocator's rules, the need is above it.
        """

    def estimated_bytes(self, rows: int, room_bytes: int) -> int | None:
        """Return the same from what other numbers of rows were traced with, at once; None where that does not tell."""

    def asks_for(self, rows: int, size_bytes: float, slack_bytes: float) -> bool | None:
        """Return whether ``rows`` rows ask the allocator for so many bytes, as it rounds them, within a slack.

        By what other numbers of rows were traced with; None where that does not tell.
        """

    def results_bytes(self) -> int:
        """Return the bytes of the results of all rows, which may wait on the host; 0 where they do."""

    def why_together(self) -> str | None:
        """Return what makes a row of the call depend on those beside it; None where nothing does, or that cannot be told."""

    def why_not_again(self) -> str | None:
        """Return what the call changes that it reads, so that another gives something else; None where nothing tells."""


def largest_rows(need_bytes: Callable[[int], int | None], room_bytes: int, too_many: int) -> tuple[int, int] | None:
    """Return the largest number of rows below ``too_many`` whose need is at most ``room_bytes``, and that need.

    Args:
        need_bytes: returns what a number of rows needs, which rises with the rows; None where it cannot tell.
        room_bytes: what there is.
        too_many: rows that are known not to fit.

    Returns:
        The rows and their need; 0 rows and the need of one where not one fits; None where a need cannot be told. Where the need
        is far from a line the search ends early, with a number that is known to fit.
    """
    low, high = 1, too_many - 1
    if high < low:
        return None
    low_need, high_need = need_bytes(low), need_bytes(high)
    if low_need is None or high_need is None:
        return None
    if low_need > room_bytes:
        return 0, low_need
    if high_need <= room_bytes:
        return high, high_need
    crawled = False
    for _ in range(_MOST_QUESTIONS):
        if high - low <= 1:
            break
        on_line = low + int((room_bytes - low_need) * (high - low) / (high_need - low_need))
        guess = (low + high) // 2 if crawled else min(max(on_line, low + 1), high - 1)
        need = need_bytes(guess)
        if need is None:
            return None
        crawled = guess == (low + 1 if need <= room_bytes else high - 1)
        if need <= room_bytes:
            low, low_need = guess, need
        else:
            high, high_need = guess, need
    return low, low_need


def most_rows(
    need_bytes: Callable[[int], int | None],
    estimated_bytes: Callable[[int], int | None],
    room_bytes: int,
    too_many: int,
) -> tuple[int, int] | None:
    """Return what ``largest_rows`` does where the need does not rise with every row: an allocator takes whole segments.

    Estimates find the number, also above one that does not fit; a trace tells whether it does.

    Args:
        need_bytes: as there; it costs seconds.
        estimated_bytes: the same from the traces so far, at once; None where they do not tell.
        room_bytes: what there is.
        too_many: rows that are known not to fit.
    """

    def quick(rows: int) -> int | None:
        told = estimated_bytes(rows)
        return need_bytes(rows) if told is None else told

    found = largest_rows(quick, room_bytes, too_many)
    if found is None:
        return None
    above = islice(_rows_above(found[0], estimated_bytes, room_bytes, too_many), _MOST_CONFIRMED)
    for rows in (*above, *([found[0]] if found[0] else [])):
        need = need_bytes(rows)
        if need is not None and need <= room_bytes:
            return rows, need
    return largest_rows(need_bytes, room_bytes, too_many) if found[0] else found


def _rows_above(
    rows: int, estimated_bytes: Callable[[int], int | None], room_bytes: int, too_many: int
) -> Iterator[int]:
    """Yield numbers of rows above ``rows`` that fit by an estimate, the largest first."""
    step = max(1, (too_many - 1 - rows) // _MOST_ESTIMATES)
    for number in range(too_many - 1, rows, -step):
        estimate = estimated_bytes(number)
        if estimate is None:
            return
        if estimate <= room_bytes:
            yield number


@dataclass(slots=True)
class RowsThatRan:
    """What parts of a call took, by their rows, and how many rows the next part may have."""

    _taken: dict[int, int] = field(default_factory=dict)
    _most: int | None = None

    def failed(self, rows: int) -> None:
        """Note that a part of ``rows`` rows did not fit: forget what other rows took, and never propose nearly as many again."""
        most = max(1, int(rows * _BELOW_FAILED_RATIO))
        self._taken.clear()
        self._most = most if self._most is None else min(self._most, most)

    def add(self, rows: int, taken_bytes: int) -> None:
        """Note that a part of ``rows`` rows took at most ``taken_bytes`` beyond what was alive before it."""
        self._taken[rows] = max(taken_bytes, self._taken.get(rows, 0))

    def rows_within(self, room_bytes: int) -> int:
        """Return how many rows fit in ``room_bytes``: on the line through the two largest parts, in proportion after only one.

        At most eight times the largest part, since rows to come may be heavier, and never as many as have failed.
        """
        (rows, taken), *smaller = sorted(self._taken.items(), reverse=True)
        slope = max(size / number for number, size in self._taken.items())
        if smaller and smaller[0][1] < taken:
            slope = (taken - smaller[0][1]) / (rows - smaller[0][0])
        found = rows + int((room_bytes - taken) // max(1.0, slope))
        return max(1, min(found, _MOST_GROWTH * rows, found if self._most is None else self._most))
