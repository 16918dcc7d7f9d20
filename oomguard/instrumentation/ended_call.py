"""What is noted of a call when it ends; the row is made of it later: making it there would keep the model's next call waiting."""

from __future__ import annotations

from typing import NamedTuple

from oomguard.engines.protocol import SizeOfCall
from oomguard.instrumentation.readings import Bytes
from oomguard.instrumentation.uses import uses_of
from oomguard.timeline import SeenCall, TimedAttempt


class EndedCall(NamedTuple):
    """One call or span that ended; ``began_s`` counts since the watch began, the rest is as in its row."""

    what: str
    kind: str
    began_s: float
    seconds: float
    model: str
    size: SizeOfCall
    before: Bytes
    peaks: Bytes
    after: Bytes
    limits: Bytes
    attempts: tuple[TimedAttempt, ...]
    error: str

    def row(self) -> SeenCall:
        """Return its row."""
        return SeenCall(
            self.what,
            self.kind,
            self.began_s,
            self.seconds,
            self.model,
            *self.size,
            uses=uses_of(self.before, self.peaks, self.after, self.limits),
            attempts=self.attempts,
            error=self.error,
        )
