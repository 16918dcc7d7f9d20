"""The tally of attempts: plain numbers, which the journal's must equal; whoever exports them reads them here."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from oomguard._version import __version__
from oomguard.incident import Attempt, Patch

Figure = float | Mapping[tuple[str, ...], float] | None
# The cause of an incident that no rule explains, as the contract has it.
UNKNOWN: Final = "unknown"


class Tally:
    """What the attempts of one run came to, or of all guarded calls of one process. A scrape reads it from another thread.

    Attributes:
        build: oomguard's version, as a label.
        attempts: those that began.
        failed_attempts: those that failed.
        failed_seconds: how long they ran.
        relaunches: those after a first one.
        incidents: by kind and cause.
        patches: by setting and effect.
        prediction_errors: the last ratio by fact.
        began_at: Unix seconds at which the attempt under way began; None while none runs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.build: Mapping[tuple[str, ...], float] = {(__version__,): 1}
        self.attempts = self.failed_attempts = self.relaunches = 0
        self.failed_seconds = 0.0
        self.incidents: Counter[tuple[str, ...]] = Counter()
        self.patches: Counter[tuple[str, ...]] = Counter()
        self.prediction_errors: dict[tuple[str, ...], float] = {}
        self.began_at: float | None = None

    def began(self, patches: Iterable[Patch], *, is_relaunch: bool) -> None:
        """Count an attempt that begins, with what is new in it."""
        with self._lock:
            self.attempts += 1
            self.relaunches += is_relaunch
            self.patches.update((patch.setting, str(patch.effect)) for patch in patches)
            self.began_at = time.time()

    def ended(self, attempt: Attempt, *, is_stopped: bool = False) -> None:
        """Count how an attempt ended that began; one that its user stopped did not fail, unless it has an incident."""
        with self._lock:
            self.began_at = None
            if attempt.incident is not None or not (attempt.succeeded or is_stopped):
                self.failed_attempts += 1
                self.failed_seconds += attempt.seconds
            if attempt.incident is not None:
                causes = attempt.incident.causes
                self.incidents[attempt.incident.kind, causes[0].id if causes else UNKNOWN] += 1
            self.prediction_errors.update({(fact,): error for fact, error in prediction_errors(attempt).items()})

    def figure(self, name: str) -> Figure:
        """Return one figure as it is now: a number, or numbers by their labels; None where there is none."""
        with self._lock:
            value = getattr(self, name)
            return dict(value) if isinstance(value, Mapping) else value


def prediction_errors(attempt: Attempt) -> dict[str, float]:
    """Return by fact how far an attempt's measured value is from the predicted one, as a share of it."""
    predicted = {fact: value for patch in attempt.patches for fact, value in patch.predicts.items()}
    return {
        fact: attempt.measured[fact] / value - 1
        for fact, value in predicted.items()
        if value and fact in attempt.measured
    }
