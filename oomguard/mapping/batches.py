"""How many items ``map`` takes at a time: what the user says, else more and more of them while they fit and are soon done."""

from __future__ import annotations

from typing import Final

_FIRST_ROWS: Final = 8
_MOST_ROWS: Final = 1024
# What a kill may cost where memory would allow more: a batch is stored when it is done.
_LONG_S: Final = 30.0


class BatchSize:
    """``rows`` are taken next; how many of them run together, the guard decides.

    Args:
        rows: what the user says; None: begin with a few, and double.
    """

    def __init__(self, rows: int | None) -> None:
        self.rows = _FIRST_ROWS if rows is None else rows
        self._grows = rows is None

    def ran(self, rows: int, took_s: float, *, in_parts: bool) -> None:
        """Note a batch: a full one that ran whole, and soon, is followed by one of twice as many."""
        if in_parts or took_s > _LONG_S / 2:
            self._grows = False
        if self._grows and rows == self.rows:
            self.rows = min(2 * self.rows, _MOST_ROWS)
