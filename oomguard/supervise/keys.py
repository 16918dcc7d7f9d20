"""Stops at a key of the terminal: its user repeats them, and looks at what the command answers."""

from __future__ import annotations

from collections.abc import Callable


class Keys:
    """How often such a key was pressed in a row without an answer.

    Args:
        printed: returns how many bytes the command has printed; more than the echo of a key is an answer.
    """

    def __init__(self, printed: Callable[[], int] = lambda: 0) -> None:
        self._printed = printed
        self._count = self._unanswered_bytes = 0

    def press(self, echo_bytes: int) -> int:
        """Count a key of which the terminal shows so much; return which one in a row it is."""
        printed_bytes = self._printed()
        if printed_bytes > self._unanswered_bytes:
            self._count = 0
        self._count += 1
        self._unanswered_bytes = printed_bytes + echo_bytes
        return self._count

    def forget(self) -> None:
        """Begin anew: something else was typed."""
        self._count = 0
