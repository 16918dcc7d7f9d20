"""What the parts of one call took: how many rows ran together, and how many may run next."""

from __future__ import annotations

from oomguard.memory.generate.rows import RowsThatRan


class MeasuredRows:
    """The rows that ran.

    Attributes:
        most_rows: the most that ran together.
        row_bytes: the most that one row of them took; 0 where that is not known.
    """

    def __init__(self) -> None:
        self._ran = RowsThatRan()
        self.most_rows, self.row_bytes = 0, 0.0

    def add(self, rows: int, before: int | None, peak: int | None) -> None:
        """Note rows that ran, by the bytes alive before them and at their peak."""
        self.most_rows = max(self.most_rows, rows)
        if before is not None and peak is not None:
            self.row_bytes = max(self.row_bytes, (peak - before) / rows)

    def failed(self, rows: int) -> None:
        """Note rows that ran out of memory together: what was measured before them is not enough."""
        self._ran.failed(rows)
        self.most_rows, self.row_bytes = 0, 0.0

    def rows_next(self, rows: int, used_bytes: int, room_bytes: float) -> int:
        """Return how many rows fit in ``room_bytes``, after ``rows`` that took ``used_bytes``."""
        self._ran.add(rows, used_bytes)
        return self._ran.rows_within(round(room_bytes))
