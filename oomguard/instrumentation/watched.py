"""One call or span under way, for one watch: its counters before, at most, and after."""

from __future__ import annotations

import time
from typing import Protocol

from oomguard.engines.protocol import SizeOfCall
from oomguard.incident import Attempt
from oomguard.instrumentation.ended_call import EndedCall
from oomguard.instrumentation.readings import Bytes
from oomguard.instrumentation.sampler import readings
from oomguard.observe import torch_counters
from oomguard.observe.torch_counters import Peaks
from oomguard.timeline import TimedAttempt


class Keeper(Protocol):
    """The watch that a row belongs to."""

    @property
    def began_s(self) -> float:
        """When it began, on the clock of ``time.monotonic``."""

    @property
    def limits(self) -> Bytes:
        """What each device has, as far as it was seen."""

    def read(self, values: Bytes) -> None:
        """Take what the counters show at an edge of the call."""

    def keep(self, watched: Watched, ended: EndedCall) -> None:
        """Take a call that ended."""


class Watched:
    """What is measured of a call between its beginning and its end."""

    def __init__(self, keeper: Keeper, what: str, kind: str, model: str, size: SizeOfCall) -> None:
        self._keeper, self._what, self._kind, self._model, self._size = keeper, what, kind, model, size
        self._attempts: list[TimedAttempt] = []
        self._before = readings.of_call()
        keeper.read(self._before)
        self._peaks = Peaks()
        self._began_s = self._attempt_began_s = time.monotonic()

    def take(self, values: Bytes) -> None:
        """Take a sample of what this call is told by."""
        self._peaks.take({key: value for key, value in values.items() if key in self._before})

    def attempted(self, attempt: Attempt) -> None:
        """Take an attempt of a guard: it began after the last one was explained, and took its own seconds."""
        began_s = self._attempt_began_s - self._keeper.began_s
        self._attempts.append(TimedAttempt(attempt, began_s, began_s + attempt.seconds))
        self._attempt_began_s = time.monotonic()

    def ended(self, error: BaseException | None) -> None:
        """Take the end, and what was raised."""
        seconds = time.monotonic() - self._began_s
        after = readings.of_call()
        self._peaks.take(after)
        self._keeper.read(after)
        ended = EndedCall(
            self._what,
            self._kind,
            self._began_s - self._keeper.began_s,
            seconds,
            self._model,
            self._size,
            self._before,
            self._peaks.end(),
            after,
            torch_counters.simulated_limits() or self._keeper.limits,
            tuple(self._attempts),
            "" if error is None else type(error).__name__,
        )
        self._keeper.keep(self, ended)
