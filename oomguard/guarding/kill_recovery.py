"""Halve the batch of a guarded function whose process was killed for memory.

A kill leaves no measurement, so no better size is known. A function without a batch runs unchanged,
and the log says so.
"""

from __future__ import annotations

import functools
from typing import Final

from oomguard.core.log import get_logger
from oomguard.engines.protocol import KilledBefore, WatchedCall
from oomguard.engines.registry import killed_before
from oomguard.remedy.policy import Policy

_BATCH: Final = "batch_size"


class KillRecovery:
    """The effect of an earlier kill on one guarded function; true if there was a kill.

    Args:
        name: the function's name.
        policy: what the user permits.
    """

    def __init__(self, name: str, policy: Policy) -> None:
        self._name = name
        self._policy = policy

    def __bool__(self) -> bool:
        return killed_before() is not None

    def rows(self, call: WatchedCall, rows: int) -> int:
        """Return how many rows of a call to begin with, and log the reduction once.

        ``rows`` is their number without a kill.
        """
        killed = killed_before()
        if killed is None:
            return rows
        why = call.not_splittable or (
            "batch_size is pinned" if _BATCH in self._policy.pinned else None
        )
        least = self._policy.minimum.get(_BATCH, 1)
        if why is not None:
            fewer = rows
        else:
            fewer = max(int(least), rows >> killed.times, 1)
        if fewer < rows:
            _log(self._name, killed, f"{rows} -> {fewer}")
            return fewer
        _log(
            self._name,
            killed,
            None,
            why or "no fewer rows are permitted" if rows > 1 else "it has one row",
        )
        return rows

    def log_unchanged(self) -> None:
        """Log once that a function without batch arguments runs again unchanged."""
        killed = killed_before()
        if killed is not None:
            _log(self._name, killed, None, "guard(batch=...) names the argument to split")


@functools.lru_cache(maxsize=64)
def _log(name: str, killed: KilledBefore, rows: str | None, why: str | None = None) -> None:
    fields = {"function": name, "killed_by": killed.by, "times": killed.times}
    if rows is not None:
        get_logger().warning(
            "run again after a kill for memory, with fewer rows", **fields, rows=rows
        )
    else:
        get_logger().warning("run again after a kill for memory, as it was", **fields, why=why)
