"""Add the options of ``run`` for GPUs, ranks, servers and schedulers, and carry them out."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import click

from oomguard.analyst.attempt_hooks import AttemptHook, Coordinator, NoCoordinator
from oomguard.analyst.outcome import TerminationReason
from oomguard.cli.options import Count, Duration, F, add_options, option, words_before_dashes
from oomguard.core.errors import OomguardError, UsageError, exit_status_of
from oomguard.core.log import get_logger

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import DeviceAssignment
    from oomguard.analyst.link import ReceivedSignals
    from oomguard.analyst.outcome import Outcome
    from oomguard.cli.run import RunSetup
    from oomguard.cluster.health import Health, SystemdNotifier
    from oomguard.cluster.ranks.coordinator import RankCoordinator
    from oomguard.cluster.slurm import RunInJob
    from oomguard.core.incident import Patch
    from oomguard.engines.command import Launch
    from oomguard.remedy.policy import Policy

DEVICES: Final = "Devices"


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """Hold the placement options; without ``--gpus`` oomguard does not choose devices."""

    gpus: str | None
    wait_s: float | None
    lease: Literal["start", "job"]
    lease_folder: str | None
    own: tuple[str, ...] = ()

    def device_assignment(
        self, argv: Sequence[str], pinned: Sequence[str], outer_pid: int | None
    ) -> DeviceAssignment:
        """Return the device assignment for the attempts of a run.

        Raises:
            UsageError: an option is invalid or needs ``--gpus``.
        """
        # Without --gpus oomguard leaves the choice of devices to the command.
        if self.gpus is None:
            if self.wait_s is not None:
                raise UsageError(
                    "--wait needs --gpus",
                    hint="oomguard run --gpus auto --wait 30m -- …",
                )
            from oomguard.analyst.attempt_hooks import NoPlacement

            return NoPlacement()
        from oomguard.analyst.attempt_settings import DEVICE
        from oomguard.cluster.placement.leases import LeaseFolder
        from oomguard.cluster.placement.need import Invocation, read_gpus
        from oomguard.cluster.placement.placer import Placer, RunPlacement
        from oomguard.core.redact import mask_command

        folder = LeaseFolder(
            None if self.lease_folder is None else Path(self.lease_folder).absolute()
        )
        command = tuple(mask_command(argv, keep_homes=True))
        own = tuple(mask_command(self.own, keep_homes=True))
        asked = read_gpus(self.gpus)
        invocation = Invocation(asked.shown, shlex.join(command), own)
        placer = Placer(asked, folder, dict(os.environ), invocation, self.lease, outer_pid)
        return RunPlacement(placer, self.lease, self.wait_s, DEVICE in pinned)


def _folder_named(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise UsageError(
            "--lease-folder '': the name is empty",
            hint="leave out --lease-folder to use /tmp/oomguard-leases",
        )
    return value


def lease_folder_option(function: F) -> F:
    """Add the option --lease-folder."""
    return option(
        "--lease-folder",
        type=click.Path(file_okay=False),
        callback=_folder_named,
        metavar="DIR",
        help="Folder of device leases, which all users must share.",
        show_default="/tmp/oomguard-leases",  # noqa: S108 - only shown
        group=DEVICES,
        example="/var/lib/oomguard",
    )(function)


def placement_options(function: F) -> F:
    """Add --gpus, --wait, --lease and --lease-folder; the command gets them as ``placement``."""

    @functools.wraps(function)
    def with_placement(
        *args: Any,
        gpus: str | None,
        wait: float | None,
        lease: Literal["start", "job"],
        lease_folder: str | None,
        **kwargs: Any,
    ) -> Any:
        source = click.get_current_context().get_parameter_source("wait")
        if gpus is None and source is click.core.ParameterSource.DEFAULT_MAP:
            # A configuration file applies to runs with and without --gpus.
            wait = None
        return function(
            *args,
            placement=PlacementOptions(gpus, wait, lease, lease_folder, words_before_dashes()),
            **kwargs,
        )

    return add_options(
        cast("F", with_placement),
        (
            option(
                "--gpus",
                metavar="auto|N|LIST",
                help=(
                    "Choose the devices before the start: as many as the command needs, N of "
                    "them, or a list (0,1 or UUIDs)."
                ),
                show_default="the devices that the command sees",
                group=DEVICES,
                example="auto",
            ),
            option(
                "--wait",
                type=Duration(),
                metavar="TIME",
                help="Wait at most this long for a busy device (needs --gpus).",
                show_default="do not wait",
                group=DEVICES,
                example="30m",
            ),
            option(
                "--lease",
                type=click.Choice(["start", "job"]),
                default="start",
                show_default=True,
                help=(
                    "Reserve the devices until the engine has taken its memory, or until the job "
                    "ends (needs --gpus)."
                ),
                group=DEVICES,
            ),
            lease_folder_option,
        ),
    )


# NCCL's own watchdog needs longer, so the ranks agree before it ends them.
DEFAULT_RANK_TIMEOUT_S: Final = 30.0
# A rank that is ended for another one gets this part of the time; the rest is for the agreement.
_GRACE_RATIO: Final = 1 / 3
_OFF: Final = "none"
RANKS: Final = "Several ranks"


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """Hold the rank options; without any, the launcher's variables decide."""

    rank: int | None
    world_size: int | None
    rendezvous: str | None
    timeout_s: float

    def support(
        self, launch: Launch, signals: ReceivedSignals, grace_s: float, *, is_inside: bool
    ) -> RankSupport:
        """Return the coordination of this run; inside another run, the outer one coordinates.

        Raises:
            UsageError: an option is invalid or incomplete, or another process already has this
                rank.
        """
        self._check_rank()
        return RankSupport(
            None if is_inside else self._of_a_job(launch, signals, grace_s, os.environ)
        )

    def _check_rank(self) -> None:
        """Check that the rank is one of the job's.

        Raises:
            UsageError: it is not.
        """
        if self.rank is None or self.world_size is None or self.rank < self.world_size:
            return
        raise UsageError(
            f"--rank {self.rank} is too high for --world-size {self.world_size}",
            hint=f"ranks count from 0, so the last one is --rank {self.world_size - 1}",
        )

    def _of_a_job(
        self, launch: Launch, signals: ReceivedSignals, grace_s: float, environ: Mapping[str, str]
    ) -> RankCoordinator | None:
        """Return the coordinator of this rank, or None for a single process.

        Raises:
            UsageError: an option is invalid or incomplete, or another process already has this
                rank.
        """
        # The user may know better than a launcher's variables.
        if self.rendezvous == _OFF:
            return None
        from oomguard.cluster.ranks.rendezvous import RankIdentity, detect_rank

        if self.rendezvous == "":
            raise UsageError(
                "--rendezvous '': the value is empty",
                hint="--rendezvous DIR, a folder that all ranks see",
            )
        # The user's options come before the launcher's variables, and those before the command's
        # own.
        own = self._asked() or detect_rank(environ)
        if own is None:
            from oomguard.engines.devices import ranks_in_command

            found = ranks_in_command(launch)
            if found is None:
                own = None
            else:
                own = RankIdentity(**found)
        # --rendezvous says that there are several ranks, so weaker signs of a rank are enough.
        if own is None and self.rendezvous is not None:
            own = detect_rank(environ, is_one_job=True)
            if own is None:
                why = (
                    "--rendezvous needs the number of this rank, which the launcher does not report"
                )
                raise UsageError(why, hint="--rank I --world-size N")
        if own is None:
            return None
        from oomguard.analyst.outcome import CommandTerminator
        from oomguard.cluster.ranks.barrier import RankLock
        from oomguard.cluster.ranks.coordinator import RankCoordinator
        from oomguard.cluster.ranks.rendezvous import rendezvous

        end = CommandTerminator(signals, min(grace_s, _GRACE_RATIO * self.timeout_s))
        place = rendezvous(own, self.rendezvous)
        # A script that starts N ranks may start only one.
        if own.size == 1:
            return None
        claim = RankLock(place.folder, own.rank, own.size, leaves_word=self.rendezvous is not None)
        try:
            claim.take()
        except UsageError as error:
            # A launcher's variables may describe a place that does not work here. Only the user's
            # own option is an error.
            if self.rendezvous is not None:
                raise
            get_logger().error(
                "the ranks cannot meet, so no rank restarts automatically",
                reason=str(error),
                hint=error.hint,
            )
            # A launcher's variables may not distinguish two jobs.
            place = replace(place, problem=str(error))
        return RankCoordinator(place, self.timeout_s, end, claim)

    def _asked(self) -> Any:
        if self.rank is None and self.world_size is None:
            return None
        if self.rank is None or self.world_size is None or self.rendezvous is None:
            raise UsageError(
                "--rank needs --world-size and --rendezvous",
                hint="--rank 0 --world-size 4 --rendezvous DIR",
            )
        from oomguard.cluster.ranks.rendezvous import RankIdentity

        return RankIdentity(self.rank, self.world_size, "--rank")


class RankSupport:
    """Wrap one rank of a job, or a single process."""

    def __init__(self, job: RankCoordinator | None) -> None:
        self._job = job

    def __enter__(self) -> RankSupport:
        return self

    def __exit__(self, *_of_error: object) -> None:
        """Leave the other ranks."""
        if self._job is not None:
            self._job.close()

    @property
    def is_reporter(self) -> bool:
        """Whether this process reports the run and writes its journal; only one rank does."""
        return self._job is None or self._job.is_reporter

    @property
    def reports_for_all(self) -> bool | None:
        """Whether this process reports for all ranks, or None for a single process."""
        if self._job is None:
            return None
        return self._job.is_reporter

    def may_reuse(self) -> bool:
        """Return whether the first attempt may begin with changes from the journal.

        Ranks of one job may read different journals, so they may not.
        """
        if self._job is not None:
            get_logger().warning(
                "ignored --reuse, because all ranks of a job must begin with the same settings"
            )
        return self._job is None

    @property
    def companions(self) -> tuple[AttemptHook, ...]:
        """The listeners of each attempt."""
        if self._job is None:
            return ()
        return (self._job,)

    @property
    def together(self) -> Coordinator:
        """The coordinator that decides after an attempt."""

        if self._job is None:
            return NoCoordinator()
        return self._job

    def ended_by_us(self) -> TerminationReason | None:
        """Return why the last attempt was ended for another rank, or None."""
        if self._job is None:
            return None
        return self._job.ended_by_us()


def ranks_options(function: F) -> F:
    """Add --rank, --world-size, --rendezvous and --rank-timeout, passed as ``ranks``."""

    @functools.wraps(function)
    def with_ranks(
        *args: Any,
        rank: int | None,
        world_size: int | None,
        rendezvous: str | None,
        rank_timeout: float,
        **kwargs: Any,
    ) -> Any:
        return function(
            *args, ranks=RanksOptions(rank, world_size, rendezvous, rank_timeout), **kwargs
        )

    return add_options(
        cast("F", with_ranks),
        (
            option(
                "--rank",
                type=Count(0),
                help="Number of this rank in its job, counted from 0.",
                show_default="from torchrun, srun, mpirun, RANK, or vLLM's own options",
                group=RANKS,
                example="0",
            ),
            option(
                "--world-size",
                type=Count(1),
                help="Number of ranks, each started with its own oomguard run.",
                show_default="from the launcher",
                group=RANKS,
                example="2",
            ),
            option(
                "--rendezvous",
                metavar="WHERE",
                help=(
                    "Place where the ranks agree on a change: a folder that all ranks see, "
                    "tcp://HOST:PORT of rank 0, ray, or none."
                ),
                show_default="MASTER_ADDR:MASTER_PORT, or on one host a temporary folder",
                group=RANKS,
                example="/shared/job-7",
            ),
            option(
                "--rank-timeout",
                type=Duration(),
                default=DEFAULT_RANK_TIMEOUT_S,
                show_default=f"{DEFAULT_RANK_TIMEOUT_S:.0f}s",
                metavar="TIME",
                help="Time for all ranks to report their result after the first failure.",
                group=RANKS,
                example="60s",
            ),
        ),
    )


# A long prefill on a large model takes minutes without a token.
DEFAULT_HANG_AFTER_S: Final = 300.0
SERVERS: Final = "Servers"
# A server that restarts for weeks has a limit per hour, but none in total by default.
NO_BOUND: Final = 10**9


def serving_options(function: F) -> F:
    """Add --restart, --hang-after and --termination-message; the command gets them as
    ``serving``.
    """

    @functools.wraps(function)
    def with_serving(
        *args: Any,
        restart: str,
        hang_after: float,
        termination_message: str | None,
        **kwargs: Any,
    ) -> Any:
        asked = ServingOptions(restart, hang_after, termination_message)
        return function(*args, serving=asked, **kwargs)

    return add_options(
        cast("F", with_serving),
        (
            option(
                "--restart",
                type=click.Choice(["no", "on-failure"]),
                default="no",
                show_default=True,
                help=(
                    "Restart the command unchanged after a hang, or after a failure other than "
                    "out-of-memory."
                ),
                group=SERVERS,
                example="on-failure",
            ),
            option(
                "--hang-after",
                type=Duration(),
                default=DEFAULT_HANG_AFTER_S,
                show_default=f"{DEFAULT_HANG_AFTER_S:.0f}s",
                metavar="TIME",
                help=(
                    "Report a hang if requests wait this long without engine progress (0 = never)."
                ),
                group=SERVERS,
                example="10m",
            ),
            option(
                "--termination-message",
                type=click.Path(dir_okay=False),
                metavar="PATH",
                help="File for the summary of a failed run, at most 4096 bytes.",
                show_default="/dev/termination-log in a Kubernetes pod",
                group=SERVERS,
                example="/dev/termination-log",
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Hold the server options."""

    restart: str
    hang_after: float
    termination_message: str | None

    def checked(self, *, is_inside: bool) -> ServingOptions:
        """Return the options that apply to this run; an outer run watches and restarts instead.

        Raises:
            UsageError: the termination message cannot be written.
        """
        place = self.termination_message
        if place is not None and not os.access(Path(place).absolute().parent, os.W_OK):
            raise UsageError(
                f"--termination-message {place}: oomguard cannot write to this folder",
                hint="name a folder that exists",
            )
        if is_inside:
            return replace(self, restart="no", hang_after=0.0)
        return self

    def is_asked_for(self, ctx: click.Context) -> bool:
        """Return whether the user asked to watch the server."""
        given = ctx.get_parameter_source("hang_after") is not click.core.ParameterSource.DEFAULT
        return self.hang_after > 0 and (given or self.restarts)

    @property
    def restarts(self) -> bool:
        """Whether the command restarts after a failure that is not an out-of-memory."""
        return self.restart == "on-failure"

    def attempts(self, ctx: click.Context, given: int) -> int:
        """Return the largest number of attempts: the user's, or no limit with restarts."""
        by_default = click.core.ParameterSource.DEFAULT
        names = ("max_attempts", "max_relaunches")
        is_default = all(ctx.get_parameter_source(name) is by_default for name in names)
        if self.restarts and is_default:
            return NO_BOUND
        return given


class ServerSupport:
    """Watch the server of a run; do nothing for another kind of command.

    Args:
        options: the server options.
        launch: the command.
        signals: the signals of the run.
        grace_s: the time that the command gets to end, in seconds.
        asked: whether the user asked to watch the server.
    """

    def __init__(
        self,
        options: ServingOptions,
        launch: Launch,
        signals: ReceivedSignals,
        grace_s: float,
        *,
        asked: bool,
    ) -> None:
        self._options = options
        self._health: Health | None = None
        self._notifier: SystemdNotifier | None = None
        from oomguard.engines.registry import launcher_of
        from oomguard.engines.server import is_server

        if not is_server(launch):
            return
        from oomguard.analyst.outcome import END_S, CommandTerminator
        from oomguard.cluster.health import Health

        end = CommandTerminator(signals, min(grace_s, END_S))
        name = launcher_of(launch).NAME
        self._health = Health(
            name, options.hang_after, end, dict(os.environ), options.restarts, asked, end.is_stopped
        )
        if "NOTIFY_SOCKET" in os.environ:
            from oomguard.cluster.health import SystemdNotifier, take_systemd_socket

            systemd = take_systemd_socket(os.environ)
            if systemd is not None:
                self._notifier = SystemdNotifier(systemd, self._health, end.is_stopped)
                signals.on_stop = self._notifier.stopping

    @property
    def companions(self) -> tuple[AttemptHook, ...]:
        """The listeners of each attempt."""
        companions = []
        for companion in (self._health, self._notifier):
            if companion is not None:
                companions.append(companion)
        return tuple(companions)

    def ended_by_us(self) -> TerminationReason | None:
        """Return why oomguard ended the last attempt, or None."""
        if self._health is None:
            return None
        return self._health.ended_by_us()

    @property
    def health(self) -> Health | None:
        """The health monitor of the server, or None for another kind of command."""
        return self._health

    def report_end(self, outcome: Outcome) -> None:
        """Report the end of the run to systemd and in the termination message."""
        if self._notifier is not None:
            self._notifier.close(outcome.status)
        from oomguard.cluster.run_end import message_of

        if not outcome.attempts[-1].succeeded:
            self._leave(partial(message_of, outcome))

    @contextlib.contextmanager
    def reporting_errors(self, also: Callable[[str], None]) -> Iterator[None]:
        """Report an error that ends the run before its command starts; the error is raised again.

        Args:
            also: another function that takes the message.
        """
        try:
            yield
        except OomguardError as error:
            if self._notifier is not None:
                self._notifier.close(exit_status_of(error))
            from oomguard.cluster.run_end import message_of_error

            self._leave(partial(message_of_error, error))
            also(message_of_error(error))
            raise

    def _leave(self, message: Callable[[], str]) -> None:
        """Write the termination message, if there is a path for it."""
        from oomguard.cluster.run_end import leave_message, message_place

        place = message_place(self._options.termination_message, os.environ)
        if place is not None:
            leave_message(place, message())


_BY_CAUSE: Final = "by-cause"
# SLURM counts its restarts from 0.
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
                    "Exit with the command's own status, or with one for the cause: 90 out of "
                    "memory, 91 GPU memory in use by others, 92 hung."
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
                    "Requeue the SLURM job up to N times if it ran out of memory and oomguard "
                    "still has a change to try."
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
            # srun starts this process once for each task, and one of them writes the comment.
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
        from oomguard.cluster.run_end import by_cause

        return by_cause(outcome)

    def report_end(self, outcome: Outcome) -> None:
        """Write the end of the run into the job's comment."""
        if self._job is not None:
            from oomguard.cluster.run_end import comment_of

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
    from oomguard.cluster.health import ALIVE, Probes
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
            "oomguard cannot answer probes; the run continues without them",
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
    from oomguard.cluster.slurm import RunInJob, job_of

    job = job_of(os.environ, "the job comment is not set")
    if job is None:
        return None
    return RunInJob(job, options.slurm_requeue, shows_all=options.slurm_comment)


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
        # oomguard watches every server. It warns that it cannot watch one only if the user asked.
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
