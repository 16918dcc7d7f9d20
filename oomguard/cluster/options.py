"""Add the options of ``run`` for GPUs, ranks, servers and schedulers, and carry them out."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import click

from oomguard.cli.options import F
from oomguard.cli.run_extensions import RunSetup
from oomguard.cluster.placement.options import PlacementOptions, placement_options
from oomguard.cluster.ranks.options import RanksOptions, ranks_options
from oomguard.cluster.schedulers.options import (
    SchedulerOptions,
    SchedulerSupport,
    scheduler_options,
)
from oomguard.cluster.serving.options import ServerSupport, ServingOptions, serving_options

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import AttemptHook, Coordinator, DeviceAssignment
    from oomguard.analyst.outcome import Outcome, TerminationReason
    from oomguard.core.incident import Patch
    from oomguard.remedy.policy import Policy


def cluster_options(function: F) -> F:
    """Add all options of the cluster package; the command gets them as ``cluster``."""

    @functools.wraps(function)
    def with_cluster(
        *args: Any,
        placement: PlacementOptions,
        ranks: RanksOptions,
        serving: ServingOptions,
        scheduling: SchedulerOptions,
        **kwargs: Any,
    ) -> Any:
        asked = ClusterOptions(placement, ranks, serving, scheduling)
        return function(*args, cluster=asked, **kwargs)

    decorated = scheduler_options(cast("F", with_cluster))
    decorated = serving_options(decorated)
    decorated = ranks_options(decorated)
    return placement_options(decorated)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options that one run was given."""

    placement: PlacementOptions
    ranks: RanksOptions
    serving: ServingOptions
    scheduling: SchedulerOptions

    @property
    def has_status_by_cause(self) -> bool:
        """Whether the exit status names the cause of a failure."""
        return self.scheduling.exit_status != "own"

    def check(self, *, is_inside: bool) -> ClusterOptions:
        """Return the options that apply to this run; an outer run handles some of them.

        Raises:
            UsageError: the termination message cannot be written.
        """
        serving = self.serving.checked(is_inside=is_inside)
        return ClusterOptions(self.placement, self.ranks, serving, self.scheduling)

    def max_attempts(self, given: int) -> int:
        """Return the largest number of attempts; restarts of a server need no such limit."""
        return self.serving.attempts(click.get_current_context(), given)

    def begin(self, setup: RunSetup) -> ClusterRun:
        """Prepare a run with these options.

        Raises:
            UsageError: an option is invalid or needs another one.
        """
        return ClusterRun(self, setup)


class ClusterRun:
    """One run with its server, its rank, its scheduler and its devices.

    Args:
        options: the checked options.
        setup: the command, and what ``run`` knows about it.

    Raises:
        UsageError: an option is invalid or needs another one.
    """

    def __init__(self, options: ClusterOptions, setup: RunSetup) -> None:
        self._options = options
        self._setup = setup
        is_asked_for = options.serving.is_asked_for(click.get_current_context())
        self._server = ServerSupport(
            options.serving, setup.launch, setup.signals, setup.grace_s, asked=is_asked_for
        )
        is_inside = setup.outer_pid is not None
        self._rank = options.ranks.support(
            setup.launch, setup.signals, setup.grace_s, is_inside=is_inside
        )
        self._scheduler = SchedulerSupport(
            options.scheduling,
            self._server.health,
            is_inside=is_inside,
            reports_for_all=self._rank.reports_for_all,
        )

    def __enter__(self) -> ClusterRun:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the other ranks."""
        self._rank.__exit__(*error)

    @property
    def is_reporter(self) -> bool:
        """Whether this process reports the run; of several ranks one does."""
        return self._rank.is_reporter

    @property
    def restarts(self) -> bool:
        """Whether the command also restarts after a failure that is not an out-of-memory."""
        return self._options.serving.restarts

    @property
    def own_files(self) -> tuple[str | None, ...]:
        """The files that this run writes itself."""
        return (self._options.serving.termination_message,)

    @property
    def companions(self) -> tuple[AttemptHook, ...]:
        """The listeners of each attempt."""
        return (*self._server.companions, *self._scheduler.companions, *self._rank.companions)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator that decides after each attempt."""
        return self._rank.together

    def assign_devices(self) -> DeviceAssignment:
        """Return the assignment of devices to the attempts.

        Raises:
            UsageError: an option is invalid or needs ``--gpus``.
        """
        setup = self._setup
        return self._options.placement.device_assignment(
            setup.launch.argv, setup.pinned, setup.outer_pid
        )

    def ended_by_us(self) -> TerminationReason | None:
        """Return why oomguard ended the last attempt, or None if it ended on its own."""
        return self._server.ended_by_us() or self._rank.ended_by_us()

    def may_reuse(self) -> bool:
        """Return whether the first attempt may begin with changes from the journal."""
        return self._rank.may_reuse()

    def begins_with(self, policy: Policy) -> tuple[Patch, ...]:
        """Return the changes that the last start of the same job left for this one."""
        return self._scheduler.begins_with(policy)

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Return a context that reports an error which ends the run before its command starts."""
        return self._server.reporting_errors(self._scheduler.report_error)

    def classify(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the exit status that the user chose."""
        return self._scheduler.classified(outcome)

    def report_end(self, outcome: Outcome) -> None:
        """Report the end of this process's command to systemd and Kubernetes."""
        self._server.report_end(outcome)

    def report_to_scheduler(self, outcome: Outcome) -> None:
        """Report the end of the whole run to the scheduler."""
        self._scheduler.report_end(outcome)

    def requeue(self, outcome: Outcome) -> None:
        """Requeue the job if its next start may fit; call it last."""
        self._scheduler.requeue(outcome)
