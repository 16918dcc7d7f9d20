"""Add the ``run`` options for a command that is one rank of a job."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

from oomguard.analyst.attempt_hooks import AttemptHook, Coordinator, NoCoordinator
from oomguard.cli.options import Count, Duration, F, add_options, option
from oomguard.core.errors import UsageError
from oomguard.core.log import get_logger

if TYPE_CHECKING:
    from oomguard.analyst.link import ReceivedSignals
    from oomguard.analyst.outcome import TerminationReason
    from oomguard.cluster.ranks.coordinator import RankCoordinator
    from oomguard.engines.command import Launch

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
        if self.rendezvous == _OFF:
            return None
        from oomguard.cluster.ranks.launcher import RankIdentity, detect_rank

        if self.rendezvous == "":
            raise UsageError(
                "--rendezvous '': the value is empty",
                hint="--rendezvous DIR, a folder that all ranks see",
            )
        own = self._asked() or detect_rank(environ)
        if own is None:
            from oomguard.engines.devices import ranks_in_command

            found = ranks_in_command(launch)
            if found is None:
                own = None
            else:
                own = RankIdentity(**found)
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
        from oomguard.cluster.ranks.coordinator import RankCoordinator
        from oomguard.cluster.ranks.rank_lock import RankLock
        from oomguard.cluster.ranks.rendezvous import rendezvous

        end = CommandTerminator(signals, min(grace_s, _GRACE_RATIO * self.timeout_s))
        place = rendezvous(own, self.rendezvous)
        if own.size == 1:  # a script that starts N ranks may start only one
            return None
        claim = RankLock(place.folder, own.rank, own.size, leaves_word=self.rendezvous is not None)
        try:
            claim.take()
        except UsageError as error:
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
        from oomguard.cluster.ranks.launcher import RankIdentity

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
                "ignored --reuse: this is one of several ranks, and all must begin alike"
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
                show_default="from the launcher, as --rank",
                group=RANKS,
                example="2",
            ),
            option(
                "--rendezvous",
                metavar="WHERE",
                help=(
                    "Where the ranks agree on one change: a folder that all see, tcp://HOST:PORT "
                    "of rank 0, ray, or none."
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
