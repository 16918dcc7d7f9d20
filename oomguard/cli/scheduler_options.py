"""Add the options of ``oomguard run`` for schedulers: probes, exit status, SLURM."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from oomguard.cli.options import add_options, option
from oomguard.core.errors import UsageError

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


def scheduler_options(function: F) -> F:
    """Add --probes, --exit-status, --slurm-comment and --slurm-requeue, as ``scheduling``."""

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
                help=(
                    "Answer /livez and /readyz, which detect a hang, on a port of every address "
                    "(0 = any free port). [default: off]"
                ),
            ),
            option(
                "--exit-status",
                type=click.Choice(["own", _BY_CAUSE]),
                default="own",
                show_default=True,
                help="own: the command's status. by-cause: 90 = out of memory and nothing left to "
                "try, 91 = another process holds the GPU, 92 = server hung; otherwise the "
                "command's status.",
            ),
            option(
                "--slurm-comment",
                is_flag=True,
                help=("Append the attempt number and the outcome to the comment of the SLURM job."),
            ),
            option(
                "--slurm-requeue",
                type=click.IntRange(min=0),
                default=0,
                show_default=True,
                metavar="N",
                help="Requeue the SLURM job at most N times if it ran out of memory and a change "
                "is left, or other processes hold the GPU. Its next start begins with the changes "
                "from the job's comment.",
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


class SchedulerContext:
    """Connect a run to the scheduler that started it.

    Args:
        options: the scheduler options.
        health: the health of the command's server; None if the command is not a server.
        is_inside: whether another run is around this one and reports for it.
        tells: whether this process reports for all ranks of its job; None if it is not a rank. The
            first task of a SLURM step then reports.

    Raises:
        UsageError: if ``--probes`` is not a port.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        health: Health | None,
        *,
        is_inside: bool,
        tells: bool | None = None,
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
            if tells is None:
                speaks = os.environ.get("SLURM_PROCID", _FIRST) == _FIRST
            else:
                speaks = tells
            if speaks or tells is not None:
                self._begun = _run_in_job(self._options)
            else:
                self._begun = None
            if speaks:
                self._job = self._begun
            else:
                self._job = None
            self.companions += (self._job,) if self._job is not None else ()

    def begins_with(self, policy: Policy) -> tuple[Patch, ...]:
        """Return the changes that a job's last start left for this one.

        Every rank of the job begins with them.
        """
        if self._begun is None:
            return ()
        return self._begun.begins_with(policy)

    def classified(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the requested exit status."""
        if self._options.exit_status != _BY_CAUSE or outcome.is_stopped:
            return outcome
        from oomguard.cluster.schedulers.status_by_cause import by_cause

        return by_cause(outcome)

    def report(self, outcome: Outcome) -> None:
        """Report the end of the run to the scheduler's job."""
        if self._job is not None:
            from oomguard.cluster.serving.end_message import comment_of

            self._job.end(outcome, comment_of(outcome) if outcome.status else "oomguard: ended")

    def report_error(self, text: str) -> None:
        """Report to the scheduler's job why nothing ran."""
        if self._job is not None:
            self._job.say_error(text)

    def requeue(self, outcome: Outcome) -> None:
        """Requeue the job if its next start may fit; this is the last step of a run."""
        if self._job is not None:
            self._job.requeue(outcome)


def _probes(text: str, health: Health | None) -> AttemptHook | None:
    """Return the probe server; None, with a warning, if it cannot listen on the address."""
    from oomguard.cluster.serving.probes import ALIVE, Probes
    from oomguard.core.log import get_logger
    from oomguard.telemetry.run_metrics import ANY, parse_address

    address = parse_address(text, ANY)
    if address is None:
        raise UsageError(
            f"--probes {text}: not a port or an address",
            hint="for example: --probes 8090 or --probes 127.0.0.1:8090",
        )
    try:
        probes = Probes(address, health)
    except OSError as error:
        reason = error.strerror or str(error)
        get_logger().warning(
            "Probes are not answered, because oomguard cannot listen on this address",
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

    job = job_of(os.environ, "Did not set the job's comment")
    if job is None:
        return None
    return RunInJob(job, options.slurm_requeue, tells_all=options.slurm_comment)
