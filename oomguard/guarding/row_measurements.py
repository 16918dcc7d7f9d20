"""What the parts of one call took, and how many rows the next part may have."""

from __future__ import annotations

from typing import Final

# Rows to come may be heavier than those that ran, so a part is at most so many times the largest before it.
_MOST_GROWTH: Final = 8
# One part says little of the rows to come: without padding, say, it needs no mask.
_ONE_PART_MARGIN_RATIO: Final = 0.06
# Of rows that did not fit although others said that they do: by how much they missed is not known.
_BELOW_FAILED_RATIO: Final = 0.9


class RowMeasurements:
    """The parts that ran.

    Attributes:
        most_rows: the most rows that ran together.
        row_bytes: the most that one row of them took; 0 if that is not known.
    """

    def __init__(self) -> None:
        self.most_rows = 0
        self.row_bytes = 0.0
        self._taken_bytes: dict[int, int] = {}
        self._limit_rows: int | None = None

    def add(self, rows: int, before_bytes: int | None, peak_bytes: int | None) -> None:
        """Note rows that ran, by the bytes alive before them and at their peak."""
        self.most_rows = max(self.most_rows, rows)
        if before_bytes is None or peak_bytes is None:
            return
        taken = peak_bytes - before_bytes
        self.row_bytes = max(self.row_bytes, taken / rows)
        self._taken_bytes[rows] = max(taken, self._taken_bytes.get(rows, 0))

    def failed(self, rows: int) -> None:
        """Note rows that ran out of memory together: what was measured before them is not enough."""
        limit = max(1, int(rows * _BELOW_FAILED_RATIO))
        self._limit_rows = limit if self._limit_rows is None else min(self._limit_rows, limit)
        self._taken_bytes.clear()
        self.most_rows, self.row_bytes = 0, 0.0

    def rows_within(self, room_bytes: float) -> int | None:
        """Return how many rows fit in ``room_bytes``; None before any part was measured.

        On the line through the two largest parts; after only one in proportion, with a margin. At
        most eight times the largest part, and never as many as have failed.
        """
        if not self._taken_bytes:
            return None
        (rows, taken), *smaller = sorted(self._taken_bytes.items(), reverse=True)
        slope = max(size / number for number, size in self._taken_bytes.items())
        if not smaller:
            slope *= 1 + _ONE_PART_MARGIN_RATIO
        if smaller and smaller[0][1] < taken:
            slope = (taken - smaller[0][1]) / (rows - smaller[0][0])
        found = rows + int((room_bytes - taken) // max(1.0, slope))
        limit = found if self._limit_rows is None else self._limit_rows
        return max(1, min(found, _MOST_GROWTH * rows, limit))
