"""How many rows of a call fit: asked of a trace of the call itself, or learned from the rows that have run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

# Questions to a trace: each costs about as long as a few steps of the call on a CPU. An affine need takes two.
_MOST_QUESTIONS: Final = 10
_MOST_GROWTH: Final = 8


def largest_rows(need_bytes: Callable[[int], int | None], room_bytes: int, too_many: int) -> tuple[int, int] | None:
    """The largest number of rows below ``too_many`` whose need is at most ``room_bytes``, and that need.

    ``need_bytes`` rises with the rows; None says that it cannot tell, and then nothing is said here. (0, need of one row)
    where not one fits. Where the need is far from a line the questions end early, with a number that is known to fit.
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
        crawled = need <= room_bytes and guess == low + 1
        if need <= room_bytes:
            low, low_need = guess, need
        else:
            high, high_need = guess, need
    return low, low_need


@dataclass(slots=True)
class RowsThatRan:
    """What parts of a call took, by their rows: how many rows the next part may have."""

    _taken: dict[int, int] = field(default_factory=dict)
    _most: int | None = None

    def failed(self, rows: int) -> None:
        """A part of ``rows`` rows did not fit: what was learned from other rows does not hold for these, and none grows so far again."""
        self._taken.clear()
        self._most = rows - 1 if self._most is None else min(self._most, rows - 1)

    def add(self, rows: int, taken_bytes: int) -> None:
        """A part of ``rows`` rows took at most ``taken_bytes`` beyond what was alive before it."""
        self._taken[rows] = max(taken_bytes, self._taken.get(rows, 0))

    def rows_within(self, room_bytes: int) -> int:
        """Rows that fit in ``room_bytes``: on the line through the two largest parts, in proportion where there is one.

        Rows to come may be heavier than those that ran: at most eight times the largest part, and never one that has failed.
        """
        (rows, taken), *smaller = sorted(self._taken.items(), reverse=True)
        slope = max(size / number for number, size in self._taken.items())
        if smaller and smaller[0][1] < taken:
            slope = (taken - smaller[0][1]) / (rows - smaller[0][0])
        found = rows + int((room_bytes - taken) // max(1.0, slope))
        return max(1, min(found, _MOST_GROWTH * rows, found if self._most is None else self._most))
