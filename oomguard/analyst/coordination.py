"""Define how a rank reports an attempt, and what all ranks decide after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from oomguard.analyst.side_effects import SideEffects
from oomguard.core.incident import Diagnosis, Patch
from oomguard.remedy.policy import Policy

# Reasons of the policy alone: if a scheduler starts the job again, the change can be made.
NO_RELAUNCH: Final = "the limit of attempts is reached"
NO_TIME: Final = "its --deadline has passed"
OF_POLICY: Final = frozenset({NO_RELAUNCH, NO_TIME})


@dataclass(frozen=True, slots=True)
class SideEffectReport:
    """Describe what this process's attempt did, and what may follow it.

    Attributes:
        seen: the side effects of the attempt.
        idempotent: whether the user permits repeating them.
        own_files: files that oomguard itself writes; other ranks may take them for their commands'
            work.
        policy: what may be changed here.
        chosen: the settings that the user gave the command of this process.
    """

    seen: SideEffects = field(default_factory=SideEffects)
    idempotent: bool = False
    own_files: tuple[str, ...] = ()
    policy: Policy = field(default_factory=Policy)
    chosen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """Describe how this process's command ended.

    Attributes:
        number: the number of the attempt.
        status: its exit status.
        error: the failure in words; "" if it ran.
        diagnosis: the diagnosis of its output.
        patches: the changes that would follow.
        refusal: why it cannot run again; None if it can, as far as ``did`` permits.
        tail: the end of its output.
        failed_s: when its failure was printed first, on the monotonic clock; None without a
            failure.
        did: side effects and policy, which all ranks judge together.
    """

    number: int
    status: int
    error: str
    diagnosis: Diagnosis
    patches: tuple[Patch, ...]
    refusal: str | None
    tail: str
    failed_s: float | None
    did: SideEffectReport = field(default_factory=SideEffectReport)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold the decision of all ranks.

    Attributes:
        diagnosis: the diagnosis of the rank that failed first.
        patches: the changes of the next attempt; empty if none follows.
        variables: environment variables for the command of the next attempt.
        record: ranks, their ends and the changes, for the report and the journal.
        is_reporter: whether this rank reports the decision; exactly one does.
        left: the changes of another attempt, if only the policy forbids it.
        is_change_left: whether no attempt follows although all permit a change.
    """

    diagnosis: Diagnosis
    patches: tuple[Patch, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    is_reporter: bool = True
    left: tuple[Patch, ...] = ()
    is_change_left: bool = False


class Coordinator(Protocol):
    """Agree with the other ranks."""

    def agree(self, own: AttemptReport, stopped: Callable[[], bool]) -> Verdict | None:
        """Return the decision after an attempt; None if this process decides alone.

        It waits no longer than the deadline of the ranks.
        """

    def starts_again(
        self, number: int, agreed: Verdict | None, stopped: Callable[[], bool], *, is_able: bool
    ) -> bool:
        """Wait until all ranks can start the agreed attempt; return whether to start it.

        No rank starts if one cannot.
        """


class NoCoordinator:
    """Stand in for the coordinator of a command without other ranks."""

    def agree(self, _own: AttemptReport, _stopped: Callable[[], bool]) -> None:
        """Return None, because this process decides alone."""
        return

    def starts_again(
        self, _number: int, _agreed: Verdict | None, _stopped: Callable[[], bool], *, is_able: bool
    ) -> bool:
        """Return whether this process can start."""
        return is_able


def record_of(agreed: Verdict | None) -> Mapping[str, Any] | None:
    """Return the ranks and their ends; None for a single rank or without an agreement."""
    if agreed is None:
        return None
    return agreed.record or None
