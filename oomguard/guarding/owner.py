"""The guard, as those see it that run and watch calls for it."""

from __future__ import annotations

from typing import Protocol

from oomguard.guarding.known_sizes import KnownSizes
from oomguard.incident import Attempt, Diagnosis, Patch
from oomguard.partial import Partial
from oomguard.remedy.policy import Policy


class Owner(Protocol):
    """Whose policy a call runs under, what it learned of earlier calls, and who is told of this one."""

    policy: Policy
    known: KnownSizes
    restart: bool
    start_within_s: float | None
    reported: set[tuple[str, int]]

    def failing(self, error: BaseException) -> None:
        """Take what is to be kept of a failure before anything of it is freed."""

    def record(self, attempt: Attempt, *, is_healthy: bool = False) -> None:
        """Take an attempt that ended; ``is_healthy``: of a call that succeeded at once, as it was made."""

    def replace(self, attempt: Attempt, now: Attempt) -> None:
        """Take an attempt that ended well and has failed since."""

    def incident(self, diagnosis: Diagnosis) -> None:
        """Take what is known of a failure."""

    def patched(self, patch: Patch) -> None:
        """Take a change before it is made."""

    def ended(self, attempts: tuple[Attempt, ...], partial: Partial | None) -> None:
        """Take a call's end: its attempts where it failed at first, and the rows that are done where it was given up."""
