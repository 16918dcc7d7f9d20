"""Describe how a whole run ended: exit status, attempts, and the decisive diagnosis."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from oomguard.analyst.link import ReceivedSignals
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.core.process import status_in_words
from oomguard.retry import Ledger

# The server's own time to end after a hang; what hangs seldom takes it.
END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class CommandTerminator:
    """Stop the command of a run: first with SIGTERM, then by killing its process tree.

    Attributes:
        signals: the signals of the run.
        wait_s: seconds between both steps.
    """

    signals: ReceivedSignals
    wait_s: float

    def __call__(self, over: threading.Event) -> None:
        """Stop the command, unless ``over`` is set; wait until it is."""
        self.signals.reaper.forward(int(signal.SIGTERM), None, None)
        if not over.wait(self.wait_s):
            self.signals.reaper.kill()

    def is_stopped(self) -> bool:
        """Return whether the user asked to stop."""
        return self.signals.stopped_by is not None


@dataclass(frozen=True, slots=True)
class TerminationReason:
    """Explain why oomguard stopped an attempt.

    Attributes:
        why: one line with the numbers.
        is_hang: whether it was alive but hung. Its later output then says nothing about the cause.
        host: the supervisor's record, if the host's memory was the reason; else None.
    """

    why: str
    is_hang: bool = True
    host: Mapping[str, Any] | None = None


# The run's status if the command ends with 0 although its engine died or its output is lost, and if
# oomguard stopped the command.
FAILED_STATUS: Final = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Describe how the whole run ended.

    Attributes:
        status: the last exit status.
        attempts: every attempt.
        diagnosis: the last diagnosis with an incident, otherwise the first; None without any.
        is_ended_by_us: whether oomguard stopped the last attempt, because it could not continue.
        is_stopped: whether the user stopped the run.
        left: the changes of another attempt, if only the policy forbids it.
        is_change_left: whether a permitted change is left that no attempt used, for any reason.
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
    """Return how a run ended after all attempts.

    Args:
        ledger: its attempts.
        signals: the signals of the run.
        carries: whether the command can be given a setting.
        is_cut: whether some output is lost.
        is_ended_by_us: whether oomguard stopped the last attempt.
    """
    last = ledger.attempts[-1]
    if last.exit_status is not None:
        status = last.exit_status
    else:
        status = 125
    # A command that oomguard ended, or whose engine died, has failed even if it says 0.
    if is_ended_by_us or (status == 0 and (is_cut or not last.succeeded)):
        status = FAILED_STATUS
    is_between = signals.stopped_between_runs and signals.stopped_by is not None
    # A command that succeeded keeps its status.
    if is_between and status != 0:
        status = 128 + int(signals.stopped_by or 0)
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
    """Return whether a permitted change is left; with several ranks, their agreement counts."""
    incident = ledger.attempts[-1].incident
    if incident is None or ledger.is_change_left is not None:
        return incident is not None and bool(ledger.is_change_left)
    return bool(ledger.wanted(incident, carries))


def error_of(status: int, incident: Incident | None) -> str:
    """Return how an attempt failed, in words; "" if it did not."""
    if incident is None:
        dead = ""
    else:
        dead = "the engine died, exit status 0"
    if status:
        return status_in_words(status)
    return dead


def step_figures(survived: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of the steps that an engine survived: how many, and their extremes.

    Args:
        survived: the steps, as the engine reported them.
    """
    found = {"survived_steps": float(len(survived))}
    found["requests_without_room"] = float(sum("ended" in row for row in survived))
    for name, key, choose in (
        ("smallest_step_tokens", "most_tokens", min),
        ("longest_recovery_ms", "took_ms", max),
    ):
        values = []
        for row in survived:
            if isinstance(row.get(key), (int, float)):
                values.append(row[key])
        if values:
            found[name] = float(choose(values))
    return found
