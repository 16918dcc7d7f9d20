"""How a whole run ended: its exit status, its attempts, and the diagnosis that counts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from oomguard.analyst.link import ReceivedSignals
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.core.process_state import status_in_words
from oomguard.retry.ledger import Ledger

# An attempt that we ended ourselves, since it could not go on by itself.

# End a command that cannot go on by itself: it is asked first, then killed with all that it
# started.


# The server's own time to end after a hang; what hangs seldom takes it.
END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class CommandTerminator:
    """Ends the command of a run.

    Attributes:
        signals: of the run.
        wait_s: time that the command has to end.
    """

    signals: ReceivedSignals
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


# The run's own status where the command ends with 0 though its engine died, or its output did not
# arrive, as tee has it; and where we ended it, whatever our signal made of its own.
FAILED_STATUS: Final = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the whole run ended.

    Attributes:
        status: the last exit status.
        attempts: every attempt.
        diagnosis: the last one with an incident, else the first.
        is_ended_by_us: we ended the last attempt, which could not go on by itself.
        is_stopped: the user stopped the run.
        left: what another attempt would change, where the policy left none.
        is_change_left: whether a permitted change is left that no attempt was made with, for
            whatever reason.
    """

    status: int
    attempts: tuple[Attempt, ...]
    diagnosis: Diagnosis | None
    is_ended_by_us: bool = False
    is_stopped: bool = False
    left: tuple[Patch, ...] = ()
    is_change_left: bool = False


def outcome_of(
    ledger: Ledger,
    signals: ReceivedSignals,
    carries: Callable[[str], bool],
    *,
    is_cut: bool,
    is_ended_by_us: bool = False,
) -> Outcome:
    """Return how a run ended whose attempts are made.

    Args:
        ledger: its attempts.
        signals: of the run.
        carries: whether the command can be given a setting.
        is_cut: some of its output is lost.
        is_ended_by_us: we ended the last attempt, which could not go on by itself.
    """
    last = ledger.attempts[-1]
    if last.exit_status is not None:
        status = last.exit_status
    else:
        status = 125
    if is_ended_by_us or (status == 0 and (is_cut or not last.succeeded)):
        status = FAILED_STATUS
    if signals.stopped_between_runs and signals.stopped_by is not None:
        status = 128 + signals.stopped_by
    is_stopped = signals.stopped_by is not None
    how = (
        ledger.diagnosis,
        is_ended_by_us,
        is_stopped,
        ledger.left,
        _is_change_left(ledger, carries),
    )
    return Outcome(status, tuple(ledger.attempts), *how)


def _is_change_left(ledger: Ledger, carries: Callable[[str], bool]) -> bool:
    """Return whether a permitted change is left after the last attempt; several ranks have agreed
    on that.
    """
    incident = ledger.attempts[-1].incident
    if incident is None or ledger.is_change_left is not None:
        return incident is not None and bool(ledger.is_change_left)
    return bool(ledger.wanted(incident, carries))


def error_of(status: int, incident: Incident | None) -> str:
    """Return how an attempt failed, empty where it did not."""
    if incident is None:
        dead = ""
    else:
        dead = "the engine died, exit status 0"
    if status:
        return status_in_words(status)
    return dead
