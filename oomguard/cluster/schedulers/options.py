"""Add the ``run`` options for schedulers: probes, exit status, SLURM comment and requeue."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from oomguard.cli.options import Count, add_options, option
from oomguard.cluster.serving.options import SERVERS
from oomguard.core.errors import UsageError
from oomguard.core.incident import Incident

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import AttemptHook
    from oomguard.analyst.outcome import Outcome
    from oomguard.cluster.schedulers.slurm import RunInJob
    from oomguard.cluster.serving.health import Health
    from oomguard.core.incident import Patch
    from oomguard.remedy.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])
_BY_CAUSE: Final = "by-cause"
_FIRST: Final = "0"
SCHEDULERS: Final = "Schedulers"


def scheduler_options(function: F) -> F:
    """Add --probes, --exit-status, --slurm-comment and --slurm-requeue.

    The command gets them as ``scheduling``.
    """

    @functools.wraps(function)
    def with_scheduling(
        *args: Any,
        probes: str | None,
        exit_status: str,
        slurm_comment: bool,
        slurm_requeue: int,
        **kwargs: Any,
    ) -> Any:
        asked = SchedulerOptions(probes, exit_status, slurm_comment, slurm_requeue)
        return function(*args, scheduling=asked, **kwargs)

    return add_options(
        cast("F", with_scheduling),
        (
            option(
                "--probes",
                metavar="[HOST:]PORT",
                help="Answer /livez and /readyz on this port (0 picks a free one).",
                group=SERVERS,
                example="8081",
            ),
            option(
                "--exit-status",
                type=click.Choice(["own", _BY_CAUSE]),
                default="own",
                show_default=True,
                help=(
                    "Exit with the command's own status, or one by cause: 90 out of memory, 91 GPU "
                    "memory held by others, 92 hung."
                ),
                group=SCHEDULERS,
            ),
            option(
                "--slurm-comment",
                is_flag=True,
                help="Append the attempt number and outcome to the SLURM job comment.",
                group=SCHEDULERS,
            ),
            option(
                "--slurm-requeue",
                type=Count(0),
                default=0,
                show_default=True,
                help=(
                    "Requeue the SLURM job up to N times if it ran out of memory and a change "
                    "is left."
                ),
                group=SCHEDULERS,
                example="2",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Hold the scheduler options."""

    probes: str | None
    exit_status: str
    slurm_comment: bool
    slurm_requeue: int


class SchedulerSupport:
    """Report a run to its scheduler.

    Args:
        options: the scheduler options.
        health: the health monitor of the server, or None for another kind of command.
        is_inside: whether another run is around this one, which reports instead.
        reports_for_all: whether this process reports for all ranks. None: it is not a rank, and
            the first task of a SLURM step reports.

    Raises:
        UsageError: ``--probes`` is not an address.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        health: Health | None,
        *,
        is_inside: bool,
        reports_for_all: bool | None = None,
    ) -> None:
        self._options = options
        self._job = None
        self._begun: RunInJob | None = None
        self.companions: tuple[AttemptHook, ...] = ()
        if is_inside:
            self._options = SchedulerOptions(None, "own", slurm_comment=False, slurm_requeue=0)
        if self._options.probes is not None:
            probes = _probes(self._options.probes, health)
            self.companions += () if probes is None else (probes,)
        if self._options.slurm_comment or self._options.slurm_requeue:
            if reports_for_all is None:
                speaks = os.environ.get("SLURM_PROCID", _FIRST) == _FIRST
            else:
                speaks = reports_for_all
            if speaks or reports_for_all is not None:
                self._begun = _run_in_job(self._options)
            else:
                self._begun = None
            if speaks:
                self._job = self._begun
            else:
                self._job = None
            self.companions += (self._job,) if self._job is not None else ()

    def begins_with(self, policy: Policy) -> tuple[Patch, ...]:
        """Return the changes that the job's last start left; every rank begins with them."""
        if self._begun is None:
            return ()
        return self._begun.begins_with(policy)

    def classified(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the exit status that the user chose."""
        if self._options.exit_status != _BY_CAUSE or outcome.is_stopped:
            return outcome
        return by_cause(outcome)

    def report_end(self, outcome: Outcome) -> None:
        """Write the end of the run into the job's comment."""
        if self._job is not None:
            from oomguard.cluster.serving.end_message import comment_of

            self._job.end(outcome, comment_of(outcome) if outcome.status else "oomguard: ended")

    def report_error(self, text: str) -> None:
        """Write into the job's comment why nothing ran."""
        if self._job is not None:
            self._job.report_error(text)

    def requeue(self, outcome: Outcome) -> None:
        """Requeue the job if its next start may fit; call this last."""
        if self._job is not None:
            self._job.requeue(outcome)


def _probes(text: str, health: Health | None) -> AttemptHook | None:
    """Return the probe server, or None with a warning if it cannot listen."""
    from oomguard.cluster.serving.health import ALIVE, Probes
    from oomguard.core.http_port import ANY, parse_address
    from oomguard.core.log import get_logger

    address = parse_address(text, ANY)
    if address is None:
        raise UsageError(
            f"--probes {text} is not a port or an address",
            hint="--probes 8090, --probes 127.0.0.1:8090",
        )
    try:
        probes = Probes(address, health)
    except OSError as error:
        reason = error.strerror or str(error)
        get_logger().warning(
            "probes are not answered; the run continues without them",
            address=str(address),
            reason=reason,
        )
        return None
    if address.port == 0:
        write = get_logger().info
    else:
        write = get_logger().debug
    write("Answering probes", port=probes.address.port, path=ALIVE)
    return probes


def _run_in_job(options: SchedulerOptions) -> RunInJob | None:
    from oomguard.cluster.schedulers.slurm import RunInJob, job_of

    job = job_of(os.environ, "the job comment is not set")
    if job is None:
        return None
    return RunInJob(job, options.slurm_requeue, shows_all=options.slurm_comment)


# Choose the exit status of a failed run by its cause, for schedulers.


def by_cause(outcome: Outcome) -> Outcome:
    """Return the outcome with the status of its cause, if that is memory or a hang.

    Otherwise the command's own status stays. It also stays if a permitted change is left, because
    another start may then succeed.
    """
    incident = outcome.attempts[-1].incident
    if incident is not None and incident.is_oom:
        if is_held(incident):
            name = "device_held"
        else:
            name = "out_of_memory"
        if name == "out_of_memory" and outcome.is_change_left:
            return outcome
    elif outcome.is_ended_by_us:
        name = "ended_by_oomguard"
    else:
        return outcome
    return replace(outcome, status=_table()["statuses"][name])


def is_held(incident: Incident) -> bool:
    """Return whether memory failed because of other processes, so that a later start may fit."""
    return incident.causes[0].id in _table()["causes"]["device_held"]


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("statuses.toml").read_text(encoding="utf-8"))
