"""Define frozen records of past runs: commands, failures, changes, predictions and results."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt, Incident, Patch
from oomguard.core.records import Record

# How a run ended, according to its last attempt.
RAN: Final = "ran"
REPAIRED: Final = "repaired"
FAILED: Final = "failed"
STOPPED: Final = "stopped"
NOT_ENDED: Final = "not ended"
RESULTS: Final = (RAN, REPAIRED, FAILED, STOPPED, NOT_ENDED)
# Exit statuses that a shell reports if the user stopped the command.
STOP_STATUSES: Final = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True, slots=True, repr=False)
class PastAttempt(Record):
    """Describe one recorded attempt; times are Unix seconds.

    Attributes:
        attempt: its changes and its outcome. In a list of runs, its incident has only kind and
            cause.
        command: the command that was started, with secrets masked.
        began_at: when it began.
        ended_at: when it ended; None while it runs, or if the run was killed.
        predicted: facts and the values that the changes should produce.
        why: why it failed, if its status and incident do not say it; "" otherwise.
        is_followed: whether another attempt came after it. It then failed, whatever its status.
    """

    attempt: Attempt
    command: tuple[str, ...]
    began_at: float
    ended_at: float | None = None
    predicted: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    why: str = ""
    is_followed: bool = False

    @property
    def result(self) -> str:
        """How it ended: ``ran``, ``failed``, ``stopped`` or ``not ended``."""
        if self.ended_at is None:
            return NOT_ENDED
        if self.is_followed or self.why:
            return FAILED
        if self.attempt.succeeded:
            return RAN
        if self.attempt.incident is None and self.attempt.exit_status in STOP_STATUSES:
            return STOPPED
        return FAILED


@dataclass(frozen=True, slots=True, repr=False)
class PastRun(Record):
    """Describe one ``oomguard run`` with its attempts (at least one).

    Attributes:
        number: the number that the user types, from 1.
        session: its name in the journal.
        command: the user's command before any patch, with secrets masked.
        attempts: its attempts, in order.
        folder: the working directory; None if not recorded.
        engine: the engine that the output names; None if it names none.
        engine_version: the version that the engine printed; None if it printed none.
        model: the model that the engine printed or the command names; None if unknown.
        device: name and size of the GPUs; None if NVML reported none.
        is_forgotten: whether ``--reuse`` ignores it.
        who: the user who ran it; None if not recorded.
        host: the machine; None if not recorded.
    """

    number: int
    session: str
    command: tuple[str, ...]
    attempts: tuple[PastAttempt, ...]
    folder: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    device: str | None = None
    is_forgotten: bool = False
    who: str | None = None
    host: str | None = None

    @property
    def began_at(self) -> float:
        """When it began, in Unix seconds."""
        return self.attempts[0].began_at

    @property
    def seconds(self) -> float | None:
        """How long it took; None if its end is unknown."""
        ended_at = self.attempts[-1].ended_at
        if ended_at is None:
            return None
        return max(0.0, ended_at - self.began_at)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The failures of its attempts."""
        found = []
        for past in self.attempts:
            if past.attempt.incident is not None:
                found.append(past.attempt.incident)
        return tuple(found)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Its changes, in order."""
        found: list[Patch] = []
        for past in self.attempts:
            found += past.attempt.patches
        return tuple(found)

    @property
    def result(self) -> str:
        """How it ended: one of ``RESULTS``."""
        result = self.attempts[-1].result
        if result in {RAN, STOPPED} and len(self.attempts) > 1:
            return REPAIRED
        return result


@dataclass(frozen=True, slots=True, repr=False)
class KnownSettings(Record):
    """Describe settings under which a model ran on a device; times are Unix seconds.

    The counts include every user of the journal.

    Attributes:
        model: the model that the engine printed, masked; None if it printed none.
        engine: the engine; None if unknown.
        engine_version: the version that the engine printed; None if it printed none.
        device: name and size of the GPUs; None if NVML reported none.
        settings: the changed settings; empty if the command ran as given.
        held: how many runs succeeded with these settings.
        failed: how many runs with these settings ran out of memory.
        measured_by: user, host and number of attempts, largest number first; None if not recorded.
        first_at: when it was first measured.
        last_at: when it was last measured.
    """

    model: str | None
    engine: str | None
    engine_version: str | None
    device: str | None
    settings: Mapping[str, FactValue]
    held: int
    failed: int
    measured_by: tuple[tuple[str | None, str | None, int], ...]
    first_at: float
    last_at: float
