"""A stop that comes twice in one moment from who signals oomguard and then its group (timeout): one, to a command alone."""

from __future__ import annotations

from typing import Final

from oomguard.supervise.signal_sets import STOPS

# A command alone has not handled the first of two that come so close to each other.
_TWIN_S: Final = 0.005


class Twin:
    """Tell whether a signal repeats the one before it."""

    def __init__(self) -> None:
        self._last: tuple[int, int | None, float] = (0, None, 0.0)

    def is_second(self, number: int, sender: int | None, came_s: float) -> bool:
        """Return whether a sender's stop came just before; ``came_s`` in seconds of one clock."""
        before, self._last = self._last, (number, sender, came_s)
        return (
            sender is not None and number in STOPS and before[:2] == (number, sender) and came_s - before[2] < _TWIN_S
        )
