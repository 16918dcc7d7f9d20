"""An attempt that we ended ourselves, since it could not go on by itself."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass

from oomguard.analyst.link import Signals

# End a command that cannot go on by itself: it is asked first, then killed with all that it
# started.


@dataclass(frozen=True, slots=True)
class Ending:
    """Ends the command of a run.

    Attributes:
        signals: of the run.
        wait_s: time that the command has to end.
    """

    signals: Signals
    wait_s: float

    def __call__(self, over: threading.Event) -> None:
        """End it, unless it is over before; wait until it is."""
        self.signals.watcher.forward(int(signal.SIGTERM), None, None)
        if not over.wait(self.wait_s):
            self.signals.watcher.kill()

    def is_stopped(self) -> bool:
        """Return whether the user asked to stop."""
        return self.signals.stopped_by is not None


@dataclass(frozen=True, slots=True)
class EndedByUs:
    """Why we ended it.

    Attributes:
        why: in one line, with its numbers.
        is_hang: it hung, and lived: what is printed while it is ended says nothing of the cause.
    """

    why: str
    is_hang: bool = True
