"""Define what optional packages add to a run: hooks, the choice of devices, other ranks.

A rank reports each attempt to a coordinator, and all ranks follow its decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

from oomguard.analyst.link import LiveOutput
from oomguard.analyst.side_effects import SideEffects
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.remedy.policy import Policy


class AttemptHook(Protocol):
    """Follow the attempts of one run. Hooks are called between attempts, so they must not wait."""

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Handle that an attempt has started its command, whose process is ``pid``."""

    def ended(self, attempt: Attempt) -> None:
        """Handle the end of an attempt."""


@runtime_checkable
class PreStartHook(Protocol):
    """Follow attempts and also run before the command starts.

    The command inherits changes of the environment that such a hook makes.
    """

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Handle that an attempt is about to start its command, with its new patches."""


@dataclass(frozen=True, slots=True)
class AttemptHooks:
    """Call all hooks of one run."""

    of_run: tuple[AttemptHook, ...] = ()

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Call the early hooks before an attempt starts its command."""
        for companion in self.of_run:
            # Most hooks only follow the attempts.
            if isinstance(companion, PreStartHook):
                _call(partial(companion.begins, number, patches))

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Call all hooks after an attempt has started its command."""
        for companion in self.of_run:
            _call(partial(companion.began, number, launch, pid))

    def ended(self, attempt: Attempt) -> None:
        """Call all hooks after an attempt has ended."""
        for companion in self.of_run:
            _call(partial(companion.ended, attempt))


def _call(hook: Callable[[], None]) -> None:
    try:
        hook()
    except Exception as error:  # noqa: BLE001 - an error of a hook must not stop the run
        get_logger().warning(
            "A part of oomguard that follows the run failed; the command continues",
            reason=f"{type(error).__name__}: {error}",
        )


class DeviceAssignment(Protocol):
    """Choose the devices of one run, attempt by attempt."""

    def placed(self, launch: Launch, stopped: Callable[[], bool], left_s: float) -> Launch:
        """Return the launch of the next attempt, with its devices in its variables.

        It may wait until ``stopped``, and at most ``left_s`` seconds.

        Raises:
            OomguardError: if no device is free.
        """

    def watching(self, recording: LiveOutput) -> AbstractContextManager[object]:
        """Return a context for the running attempt.

        Its output shows when others may start on its devices.
        """

    def moved(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis with another device as its first action.

        That applies if a neighbor is the cause and another device has enough memory.
        """

    def once_free(self, incident: Incident, stopped: Callable[[], bool], left_s: float) -> Incident:
        """Wait, as ``placed`` may, until a failure's neighbors free memory, if the user allows it.

        The returned incident then has the device in its plan.
        """

    def devices(self) -> Collection[int] | None:
        """Return the GPUs of the next attempt by index; None if it may use any."""


class NoPlacement:
    """Leave the devices to the user's variables."""

    def placed(self, launch: Launch, _stopped: Callable[[], bool], _left_s: float) -> Launch:
        """Return the launch unchanged."""
        return launch

    def watching(self, _recording: LiveOutput) -> AbstractContextManager[object]:
        """Return an empty context."""
        return nullcontext()

    def moved(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis unchanged."""
        return diagnosis

    def devices(self) -> None:
        """Return None, because any device may be used."""
        return

    def once_free(
        self, incident: Incident, _stopped: Callable[[], bool], _left_s: float
    ) -> Incident:
        """Return the incident unchanged."""
        return incident


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

    def stopped(self, number: int, status: int) -> None:
        """Report to the other ranks that a signal ended an attempt, before any analysis."""

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

    def stopped(self, _number: int, _status: int) -> None:
        """Do nothing, because no other rank waits."""

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
