"""The options of ``oomguard run`` for a command that is one rank of a job: which it is, and where
the ranks meet.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

import click

from oomguard.cli.options import Duration, F, decorated, option
from oomguard.core.errors import UsageError
from oomguard.core.log import get_logger

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import Companion
    from oomguard.analyst.coordination import Together
    from oomguard.analyst.link import ReceivedSignals
    from oomguard.analyst.outcome import EndedByUs
    from oomguard.cluster.ranks.coordinator import RankOfAJob
    from oomguard.engines.command import Launch

DEFAULT_RANK_TIMEOUT_S: Final = 30.0
# A rank that is ended for another one has this part of the time; the rest is for the agreement.
_GRACE_RATIO: Final = 1 / 3
_OFF: Final = "none"


@dataclass(frozen=True, slots=True)
class RanksOptions:
    """What was given of them; without any, the launcher's variables tell."""

    rank: int | None
    world_size: int | None
    rendezvous: str | None
    timeout_s: float

    def beside(
        self, launch: Launch, signals: ReceivedSignals, grace_s: float, *, is_inside: bool
    ) -> BesideRanks:
        """Return what goes along with a run whose command may be one rank of a job; inside another
        run that one agrees.

        Raises:
            UsageError: an option cannot be understood, or misses another, or another process is
                this rank already.
        """
        return BesideRanks(
            None if is_inside else self._of_a_job(launch, signals, grace_s, os.environ)
        )

    def _of_a_job(
        self, launch: Launch, signals: ReceivedSignals, grace_s: float, environ: Mapping[str, str]
    ) -> RankOfAJob | None:
        """Return this process as one rank of a job; None where it is none.

        Raises:
            UsageError: an option cannot be understood, or misses another, or another process is
                this rank already.
        """
        if self.rendezvous == _OFF:
            return None
        from oomguard.cluster.ranks.launcher import Launched, launched

        if self.rendezvous == "":
            raise UsageError(
                "--rendezvous '': it names no place",
                hint="--rendezvous DIR, a folder that all ranks see",
            )
        own = self._asked() or launched(environ)
        if own is None:
            from oomguard.engines.devices import ranks_in_command

            found = ranks_in_command(launch)
            if found is None:
                own = None
            else:
                own = Launched(**found)
        if own is None and self.rendezvous is not None:
            own = launched(environ, is_one_job=True)
            if own is None:
                why = (
                    "--rendezvous is for one of several ranks, and nothing tells which one this is"
                )
                raise UsageError(why, hint="--rank I --world-size N")
        if own is None:
            return None
        from oomguard.analyst.outcome import CommandTerminator
        from oomguard.cluster.ranks.coordinator import RankOfAJob
        from oomguard.cluster.ranks.rank_lock import Claim
        from oomguard.cluster.ranks.rendezvous import rendezvous

        end = CommandTerminator(signals, min(grace_s, _GRACE_RATIO * self.timeout_s))
        place = rendezvous(own, self.rendezvous)
        if own.size == 1:  # a script that starts N ranks starts one too
            return None
        claim = Claim(place.folder, own.rank, own.size, leaves_word=self.rendezvous is not None)
        try:
            claim.take()
        except UsageError as error:
            if self.rendezvous is not None:
                raise
            get_logger().error(
                "the ranks cannot meet: none starts again by itself",
                reason=str(error),
                hint=error.hint,
            )
            place = replace(
                place, problem=str(error)
            )  # a launcher's variables may tell two jobs from each other badly
        return RankOfAJob(place, self.timeout_s, end, claim)

    def _asked(self) -> Any:
        if self.rank is None and self.world_size is None:
            return None
        if self.rank is None or self.world_size is None or self.rendezvous is None:
            raise UsageError(
                "--rank, --world-size and --rendezvous belong together",
                hint="--rank 0 --world-size 4 --rendezvous DIR",
            )
        if self.rank >= self.world_size:
            raise UsageError(
                f"--rank {self.rank} of --world-size {self.world_size}", hint="ranks count from 0"
            )
        from oomguard.cluster.ranks.launcher import Launched

        return Launched(self.rank, self.world_size, "--rank")


class BesideRanks:
    """One rank of a job, or a command that is none."""

    def __init__(self, job: RankOfAJob | None) -> None:
        self._job = job

    def __enter__(self) -> BesideRanks:
        return self

    def __exit__(self, *_of_error: object) -> None:
        """Leave the other ranks."""
        if self._job is not None:
            self._job.close()

    @property
    def tells(self) -> bool:
        """Whether this process tells of the run, and keeps its journal and report: of several ranks
        one does.
        """
        return self._job is None or self._job.tells

    @property
    def speaks(self) -> bool | None:
        """Whether this process speaks for all ranks; None: it is none of several."""
        if self._job is None:
            return None
        return self._job.tells

    def may_reuse(self) -> bool:
        """Return whether the first attempt may begin with what a journal knows: ranks of one job
        may read different ones.
        """
        if self._job is not None:
            get_logger().warning(
                "--reuse is left out: this is one of several ranks, and all begin alike"
            )
        return self._job is None

    @property
    def companions(self) -> tuple[Companion, ...]:
        """What hears of each attempt."""
        if self._job is None:
            return ()
        return (self._job,)

    @property
    def together(self) -> Together:
        """What decides after an attempt."""
        from oomguard.analyst.coordination import Alone

        if self._job is None:
            return Alone()
        return self._job

    def ended_by_us(self) -> EndedByUs | None:
        """Return why the last attempt was ended for another rank; None where it was not."""
        if self._job is None:
            return None
        return self._job.ended_by_us()


def ranks_options(function: F) -> F:
    """Add --rank, --world-size, --rendezvous and --rank-timeout; the command gets them as
    ``ranks``.
    """

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

    return decorated(
        cast("F", with_ranks),
        (
            option(
                "--rank",
                type=click.IntRange(min=0),
                metavar="I",
                help="Which rank of its job the command is, from 0: needed where no launcher "
                "tells. [default: as torchrun, srun, mpirun, "
                "RANK and WORLD_SIZE, or vLLM's own options tell]",
            ),
            option(
                "--world-size",
                type=click.IntRange(min=1),
                metavar="N",
                help=(
                    "How many ranks the job has, each under an oomguard run of its own: needed "
                    "with --rank, else told as that is."
                ),
            ),
            option(
                "--rendezvous",
                metavar="WHERE",
                help="Where the ranks agree on one change: a folder that all see, tcp://HOST:PORT "
                "of rank 0, ray (the cluster that runs "
                "here), or none to have each rank alone. Needed with --rank, and for tasks of srun "
                "or mpirun without MASTER_ADDR, "
                "which may be no ranks of one job. [default: the store at MASTER_ADDR:MASTER_PORT, "
                "on one host a folder of its "
                "temporary files]",
            ),
            option(
                "--rank-timeout",
                type=Duration(),
                default=DEFAULT_RANK_TIMEOUT_S,
                show_default=True,
                metavar="TIME",
                help=(
                    "After the first failure, so long for all ranks to say how they ended; none "
                    "starts again without the others."
                ),
            ),
        ),
    )
