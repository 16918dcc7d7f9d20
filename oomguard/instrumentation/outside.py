"""What is told of a span or a mark that is made while its watch is not entered: nothing of it is in what the watch saw."""

from __future__ import annotations

from oomguard import records
from oomguard.switch import disabled


class Outside:
    """Those of one watch: a warning for the first span and the first mark, as a function in a loop may make a million."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, kind: str, label: object) -> None:
        """Warn of one; the user's work goes on, for a watch changes nothing of it."""
        if kind in self._told or disabled():
            return
        self._told.add(kind)
        from oomguard.log import get_logger

        hint = f"make it inside with oomguard.watch() as seen:, or enter the watch again around it (with seen:); a later {kind} is not told"
        get_logger().warning(
            f"a {kind} is not noted: its watch has ended or has not begun", label=records.shown(str(label)), hint=hint
        )
