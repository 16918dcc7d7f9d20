"""What goes along with a run and counts its attempts, wherever the figures go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from oomguard.engines.command import Launch
from oomguard.incident import Attempt, Patch
from oomguard.telemetry.tally import Tally


class Outlet(Protocol):
    """Where the figures go."""

    def update(self) -> None:
        """Take what is new."""


class RunMetrics:
    """Counts the attempts of one run, as the journal keeps them.

    Args:
        tally: where they are counted.
        stopped: whether the user has stopped the run: an attempt that ends of that did not fail.

    Attributes:
        outlet: where they go; None: nowhere.
        pid: the command of the attempt under way.
    """

    def __init__(self, tally: Tally, stopped: Callable[[], bool]) -> None:
        self._tally, self._stopped = tally, stopped
        self._patches: tuple[Patch, ...] = ()
        self.outlet: Outlet | None = None
        self.pid: int | None = None

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Note what is new in an attempt that is about to start its command."""
        del number
        self._patches = patches

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Count an attempt whose command has started."""
        del launch
        self.pid = pid
        self._tally.began(self._patches, is_relaunch=number > 1)
        self._update()

    def ended(self, attempt: Attempt) -> None:
        """Count how it ended. One that a stop kept from starting is none."""
        if self._tally.began_at is not None:
            self.pid = None
            self._tally.ended(attempt, is_stopped=self._stopped())
            self._update()

    def _update(self) -> None:
        if self.outlet is not None:
            self.outlet.update()
