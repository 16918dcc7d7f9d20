"""The options of ``oomguard run`` for what schedules it: probes, an exit status by cause, a SLURM
job's comment and its queue.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from oomguard.cli.options import decorated, option
from oomguard.core.errors import UsageError

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import Companion
    from oomguard.analyst.outcome import Outcome
    from oomguard.cluster.schedulers.slurm import RunInJob
    from oomguard.cluster.serving.health import Health
    from oomguard.core.incident import Patch
    from oomguard.remedy.policy import Policy

F = TypeVar("F", bound=Callable[..., Any])
_BY_CAUSE: Final = "by-cause"
_FIRST: Final = "0"


def scheduler_options(function: F) -> F:
    """Add --probes, --exit-status, --slurm-comment and --slurm-requeue; the command gets them as
    ``scheduling``.
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

    return decorated(
        cast("F", with_scheduling),
        (
            option(
                "--probes",
                metavar="[HOST:]PORT",
                help=(
                    "Answer /livez and /readyz, which see a hang, on a port of every address of "
                    "this machine, 0 for any."
                ),
            ),
            option(
                "--exit-status",
                type=click.Choice(["own", _BY_CAUSE]),
                default="own",
                show_default=True,
                help="by-cause: a run that failed ends with 90 where memory was the cause and no "
                "permitted change is left, 91 where "
                "others hold the device's memory, 92 where its server hung; else with the "
                "command's own, as where a permitted change is "
                "left and --max-relaunches, --max-per-hour, --deadline or a file that it wrote "
                "stopped it.",
            ),
            option(
                "--slurm-comment",
                is_flag=True,
                help=(
                    "Make which attempt runs, and how the run ended, the comment of its SLURM job, "
                    "behind one it has."
                ),
            ),
            option(
                "--slurm-requeue",
                type=click.IntRange(min=0),
                default=0,
                show_default=True,
                metavar="N",
                help="Put the SLURM job back into its queue, N times at most, where memory failed "
                "and a change is left to make, or others "
                "hold the device. Its next start begins with the changes, which stand in the "
                "job's comment.",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What was asked for."""

    probes: str | None
    exit_status: str
    slurm_comment: bool
    slurm_requeue: int


class BesideScheduler:
    """What goes along with a run for what schedules it.

    Args:
        options: what was asked for.
        health: of the command's server; None: it is none.
        is_inside: another run is around this one, and speaks for it.
        tells: whether this process speaks for all ranks of its job; None: it is no rank, and of a
            step's tasks the first one speaks.

    Raises:
        UsageError: ``--probes`` names no port.
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
        self.companions: tuple[Companion, ...] = ()
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
        """Return the changes that a job's last start left for this one: every rank of a job begins
        with them.
        """
        if self._begun is None:
            return ()
        return self._begun.begins_with(policy)

    def classified(self, outcome: Outcome) -> Outcome:
        """Return how the run ended, with the status that was asked for."""
        if self._options.exit_status != _BY_CAUSE or outcome.is_stopped:
            return outcome
        from oomguard.cluster.schedulers.status_by_cause import by_cause

        return by_cause(outcome)

    def tell(self, outcome: Outcome) -> None:
        """Tell the job's queue how the run ended."""
        if self._job is not None:
            from oomguard.cluster.serving.end_message import comment_of

            self._job.end(outcome, comment_of(outcome) if outcome.status else "oomguard: ended")

    def tell_error(self, text: str) -> None:
        """Tell the job's queue why nothing ran."""
        if self._job is not None:
            self._job.say_error(text)

    def requeue(self, outcome: Outcome) -> None:
        """Put the job back where its next start may fit; the last thing that a run does."""
        if self._job is not None:
            self._job.requeue(outcome)


def _probes(text: str, health: Health | None) -> Companion | None:
    """Return what answers probes; None, with a warning, where it cannot listen there: the command
    runs all the same.
    """
    from oomguard.cluster.serving.probes import ALIVE, Probes
    from oomguard.core.log import get_logger
    from oomguard.telemetry.run_metrics import ANY, parse_address

    address = parse_address(text, ANY)
    if address is None:
        raise UsageError(
            f"--probes {text}: neither a port nor an address",
            hint="--probes 8090, --probes 127.0.0.1:8090",
        )
    try:
        probes = Probes(address, health)
    except OSError as error:
        reason = error.strerror or str(error)
        get_logger().warning(
            "probes are not answered: the run goes on without", address=str(address), reason=reason
        )
        return None
    if address.port == 0:
        tell = get_logger().info
    else:
        tell = get_logger().debug
    tell("probes are answered", port=probes.address.port, path=ALIVE)
    return probes


def _run_in_job(options: SchedulerOptions) -> RunInJob | None:
    from oomguard.cluster.schedulers.slurm import RunInJob, job_of

    job = job_of(os.environ, "the job's comment is not set")
    if job is None:
        return None
    return RunInJob(job, options.slurm_requeue, tells_all=options.slurm_comment)
