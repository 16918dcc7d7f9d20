"""Define what ``run`` needs from the optional packages, and what it does without them."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import click

from oomguard.cli.options import F
from oomguard.core.installation import extension

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import AttemptHook, DeviceAssignment
    from oomguard.analyst.attempt_loop import AttemptLoop
    from oomguard.analyst.coordination import Coordinator
    from oomguard.analyst.link import Link, ReceivedSignals
    from oomguard.analyst.outcome import Outcome, TerminationReason
    from oomguard.core.incident import Patch
    from oomguard.engines.command import Launch
    from oomguard.remedy.policy import Policy


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The command of a run, and what is known before it starts.

    Attributes:
        launch: the command.
        signals: the signals that the run received.
        grace_s: the time that the command gets to end, in seconds.
        pinned: the settings that must not change.
        outer_pid: the process of a run around this one, or None.
    """

    launch: Launch
    signals: ReceivedSignals
    grace_s: float
    pinned: tuple[str, ...]
    outer_pid: int | None


class ClusterChoices(Protocol):
    """The options of the cluster package that a run was given."""

    @property
    def has_status_by_cause(self) -> bool:
        """Whether the exit status names the cause of a failure."""

    def check(self, *, is_inside: bool) -> ClusterChoices:
        """Return the options that apply to this run; raises UsageError."""

    def max_attempts(self, given: int) -> int:
        """Return the largest number of attempts."""

    def begin(self, setup: RunSetup) -> ClusterSupport:
        """Prepare a run with these options; raises UsageError."""


class ClusterSupport(Protocol):
    """The part of a run that the cluster package handles: devices, ranks, servers, schedulers."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def is_reporter(self) -> bool:
        """Whether this process reports the run; of several ranks one does."""

    @property
    def restarts(self) -> bool:
        """Whether the command also restarts after a failure that is not an out-of-memory."""

    @property
    def own_files(self) -> tuple[str | None, ...]:
        """The files that this run writes itself."""

    @property
    def companions(self) -> tuple[AttemptHook, ...]:
        """The listeners of each attempt."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator that decides after each attempt."""

    def assign_devices(self) -> DeviceAssignment:
        """Return the assignment of devices to the attempts; raises UsageError."""

    def ended_by_us(self) -> TerminationReason | None:
        """Return why oomguard ended the last attempt, or None if it ended on its own."""

    def may_reuse(self) -> bool:
        """Return whether the first attempt may begin with changes from the journal."""

    def begins_with(self, policy: Policy) -> tuple[Patch, ...]:
        """Return the changes that the last start of the same job left for this one."""

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Return a context that reports an error which ends the run before its command starts."""

    def classify(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the exit status that the user chose."""

    def report_end(self, outcome: Outcome) -> None:
        """Report the end of this process's command."""

    def report_to_scheduler(self, outcome: Outcome) -> None:
        """Report the end of the whole run to the scheduler."""

    def requeue(self, outcome: Outcome) -> None:
        """Requeue the job if its next start may fit; call it last."""


class NoCluster:
    """A run without the cluster package: one process on the devices that the user chose."""

    has_status_by_cause = False
    is_reporter = True
    restarts = False
    own_files: tuple[str | None, ...] = ()
    companions: tuple[AttemptHook, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def check(self, *, is_inside: bool) -> NoCluster:
        """Return this object."""
        del is_inside
        return self

    def max_attempts(self, given: int) -> int:
        """Return the number that the user gave."""
        return given

    def begin(self, _setup: RunSetup) -> NoCluster:
        """Return this object."""
        return self

    @property
    def coordinator(self) -> Coordinator:
        """A coordinator without other ranks."""
        from oomguard.analyst.coordination import NoCoordinator

        return NoCoordinator()

    def assign_devices(self) -> DeviceAssignment:
        """Return an assignment that leaves the devices as they are."""
        from oomguard.analyst.attempt_hooks import NoPlacement

        return NoPlacement()

    def ended_by_us(self) -> None:
        """Return None."""
        return

    def may_reuse(self) -> bool:
        """Return True."""
        return True

    def begins_with(self, _policy: Policy) -> tuple[Patch, ...]:
        """Return no change."""
        return ()

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def classify(self, outcome: Outcome) -> Outcome:
        """Return the outcome unchanged."""
        return outcome

    def report_end(self, outcome: Outcome) -> None:
        """Do nothing."""

    def report_to_scheduler(self, outcome: Outcome) -> None:
        """Do nothing."""

    def requeue(self, outcome: Outcome) -> None:
        """Do nothing."""


def cluster_options(function: F) -> F:
    """Add the options of the cluster package, if it is installed."""
    module = extension("run_cluster")
    if module is None:
        return function
    decorated: F = module.cluster_options(function)
    return decorated


def metrics_option(function: F) -> F:
    """Add --metrics, if the telemetry package is installed."""
    module = extension("run_metrics")
    if module is None:
        return function
    decorated: F = module.metrics_option(function)
    return decorated


def run_attempts(
    supervision: AttemptLoop, link: Link, ctx: click.Context, metrics: str | None, *, is_inner: bool
) -> Outcome:
    """Run the command, with metrics and spans if the telemetry package is installed.

    Args:
        supervision: the run.
        link: the connection to the supervisor.
        ctx: the command line, which shows whether a flag or a variable asks for metrics.
        metrics: the target of the metrics, or None.
        is_inner: whether another run is around this one.

    Raises:
        UsageError: ``metrics`` is invalid, or prometheus-client is not installed.
        LaunchError: the command cannot be started.
    """
    module = extension("run_metrics")
    if module is None:
        return supervision.run(link)
    outcome: Outcome = module.run_with_metrics(supervision, link, ctx, metrics, is_inner=is_inner)
    return outcome
