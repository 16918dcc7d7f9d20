"""Runs of the past, as frozen records: what was run, what failed, what was changed, predicted
beside measured.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt, Incident, Patch
from oomguard.core.records import Record

# How a run ended, by its last attempt.
RAN: Final = "ran"
REPAIRED: Final = "repaired"
FAILED: Final = "failed"
STOPPED: Final = "stopped"
NOT_ENDED: Final = "not ended"
RESULTS: Final = (RAN, REPAIRED, FAILED, STOPPED, NOT_ENDED)
# What a shell says of a command that its user ended.
STOP_STATUSES: Final = tuple(
    128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
)


@dataclass(frozen=True, slots=True, repr=False)
class PastAttempt(Record):
    """One attempt as it is remembered; times are Unix seconds.

    Attributes:
        attempt: what was changed and what came of it. Of a list of runs its incident has kind and
            cause only.
        command: what was started, secrets masked.
        began_at: when it began.
        ended_at: when it ended; None while it runs, and where the run was killed.
        predicted: facts and what the changes were predicted to make of them.
        why: why it failed, in the run's own words, where its status and incident tell less; empty:
            as they tell.
        is_followed: whether another attempt came after it: then it failed, whatever its status, as
            one that hung and was ended.
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
    """One ``oomguard run`` with its attempts, of which there is at least one.

    Attributes:
        number: by which the user names it, from 1.
        session: its name in the journal.
        command: as the user gave it, before any patch; secrets masked.
        attempts: in order.
        folder: the working directory; None where it was not recorded.
        engine: the engine that spoke; None where none did.
        engine_version: as it printed it.
        model: as the engine printed it, or the command named it.
        device: name and size of the GPUs; None where NVML told none.
        is_forgotten: whether ``--reuse`` leaves it alone.
        who: the name of the user who ran it; None where it was not recorded.
        host: the machine it ran on.
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
        """How long it took; None where its end is not known."""
        ended_at = self.attempts[-1].ended_at
        if ended_at is None:
            return None
        return max(0.0, ended_at - self.began_at)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """What its attempts failed of."""
        return tuple(
            past.attempt.incident for past in self.attempts if past.attempt.incident is not None
        )

    @property
    def patches(self) -> tuple[Patch, ...]:
        """What was changed, in order."""
        return tuple(patch for past in self.attempts for patch in past.attempt.patches)

    @property
    def result(self) -> str:
        """How it ended, one of ``RESULTS``."""
        result = self.attempts[-1].result
        if result in {RAN, STOPPED} and len(self.attempts) > 1:
            return REPAIRED
        return result


@dataclass(frozen=True, slots=True, repr=False)
class KnownSettings(Record):
    """Settings under which a model ran on a device, by all who wrote the journal; times are Unix
    seconds.

    Attributes:
        model: as the engine printed it, masked; None where it did not.
        engine: the engine.
        engine_version: as it printed it.
        device: name and size of the GPUs; None where NVML told none.
        settings: what was changed, by setting; empty: it ran as given.
        held: how often it ran so.
        failed: how often it failed so, of memory.
        measured_by: user, host, and how many attempts were theirs, most first; None where it was
            not recorded.
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
