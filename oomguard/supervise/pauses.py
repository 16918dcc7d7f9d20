"""How long a relaunch waits, and how many of them an hour may have."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from oomguard.incident import Attempt

# An attempt that failed sooner than this did not serve: as kubelet, which forgets a container's restarts after ten minutes.
QUICK_S: Final = 600.0
LONGEST_PAUSE_S: Final = 60.0
HOUR_S: Final = 3600.0
_POLL_S: Final = 0.05


def quick_failures(attempts: Sequence[Attempt]) -> int:
    """Return how many attempts, up to the last one and in a row, ended sooner than ``QUICK_S``."""
    for count, attempt in enumerate(reversed(attempts)):
        if attempt.seconds >= QUICK_S:
            return count
    return len(attempts)


def pause_s(quick: int) -> float:
    """Return the pause after so many quick failures in a row: none after the first, then 1 s, doubled up to 60 s.

    The first relaunch changes what the failure was for, and a pause changes nothing about that. Where it fails again,
    something else may be at work that takes its time. A random part of up to a second keeps several runs apart.
    """
    if quick < 2:
        return 0.0
    import tenacity

    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = quick - 1
    return tenacity.wait_exponential_jitter(max=LONGEST_PAUSE_S, jitter=1)(state)


def rest(seconds: float, stopped: Callable[[], bool]) -> None:
    """Wait so long, or until ``stopped`` says so."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0 and not stopped():
        time.sleep(min(left_s, _POLL_S))


class HourBudget:
    """Counts the relaunches of any sixty minutes.

    Args:
        most: so many may begin within an hour.
        clock: tells the seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._begun_s: deque[float] = deque(maxlen=max(1, most))

    def used(self) -> int:
        """Return the relaunches of the last hour."""
        now_s = self._clock()
        return sum(now_s < began_s + HOUR_S for began_s in self._begun_s)

    def allowed_in_s(self) -> float | None:
        """Return in how many seconds the next one may begin, 0 for now; None where none ever may."""
        if self.most == 0:
            return None
        if len(self._begun_s) < self.most:
            return 0.0
        return max(0.0, self._begun_s[0] + HOUR_S - self._clock())

    def spend(self) -> None:
        """Count a relaunch that begins now."""
        self._begun_s.append(self._clock())
