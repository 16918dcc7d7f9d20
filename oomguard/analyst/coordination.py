"""A command that is one rank of a job: what it does after a failure is decided for all ranks, or
for this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from oomguard.analyst.side_effects import SideEffects
from oomguard.core.incident import Diagnosis, Patch
from oomguard.remedy.policy import Policy


@dataclass(frozen=True, slots=True)
class OwnDeed:
    """What this process's attempt did, and what may be done after it.

    Attributes:
        seen: what the attempt did to the outside world.
        idempotent: the user permits to repeat that.
        own_files: what this oomguard itself writes, which other ranks may take for their commands'
            work.
        policy: what may be changed here.
        chosen: the settings that this process's user gave its command.
    """

    seen: SideEffects = field(default_factory=SideEffects)
    idempotent: bool = False
    own_files: tuple[str, ...] = ()
    policy: Policy = field(default_factory=Policy)
    chosen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OwnEnd:
    """How this process's command ended.

    Attributes:
        number: the attempt.
        status: its exit status.
        error: in words, empty where it ran.
        diagnosis: what its output tells.
        patches: what would be changed for it.
        refusal: why it cannot be run again; None: it can be, as far as ``did`` permits it.
        tail: the end of its output.
        failed_s: when its failure was printed first, on the monotonic clock; None where there is
            none.
        did: what speaks for or against another attempt, which all ranks together judge.
    """

    number: int
    status: int
    error: str
    diagnosis: Diagnosis
    patches: tuple[Patch, ...]
    refusal: str | None
    tail: str
    failed_s: float | None
    did: OwnDeed = field(default_factory=OwnDeed)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks agreed on.

    Attributes:
        diagnosis: of the rank that failed first.
        patches: of the next attempt; none where none follows.
        variables: what the command gets in its environment for it.
        record: the ranks, how each ended and what all change, for the report and the journal.
        tells: whether this rank tells it: one does.
        left: what another attempt would change, where only the policy left none.
        is_change_left: whether no attempt follows though all permit a change.
    """

    diagnosis: Diagnosis
    patches: tuple[Patch, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    tells: bool = True
    left: tuple[Patch, ...] = ()
    is_change_left: bool = False


class Together(Protocol):
    """Agrees with the other ranks."""

    def agree(self, own: OwnEnd, stopped: Callable[[], bool]) -> Agreed | None:
        """Return what all do after an attempt; None where this process decides alone. Wait no
        longer than the deadline of the ranks.
        """

    def starts_again(
        self, number: int, agreed: Agreed | None, stopped: Callable[[], bool], *, is_able: bool
    ) -> bool:
        """Wait until all ranks can make an attempt that they agreed on; return whether to make it:
        no rank does where one cannot.
        """


class Alone:
    """No other rank."""

    def agree(self, _own: OwnEnd, _stopped: Callable[[], bool]) -> None:
        """Return None."""
        return

    def starts_again(
        self, _number: int, _agreed: Agreed | None, _stopped: Callable[[], bool], *, is_able: bool
    ) -> bool:
        """Return what this process is able to do."""
        return is_able


def record_of(agreed: Agreed | None) -> Mapping[str, Any] | None:
    """Return the ranks and how each ended; None where there is only one, or they could
    not agree.
    """
    if agreed is None:
        return None
    return agreed.record or None
