"""A run in a SLURM job: a line for those who watch the queue, and a job that goes back to it with its changes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from oomguard.engines.command import Launch
from oomguard.facts import FactValue
from oomguard.incident import Attempt, Patch
from oomguard.log import get_logger
from oomguard.report.wording import arrow
from oomguard.schedulers.carried import behind, changes_of, is_ours, state_in, with_state
from oomguard.schedulers.slurm import Job
from oomguard.schedulers.status_by_cause import is_held
from oomguard.serving.end_message import MOST_COMMENT_BYTES, cut

if TYPE_CHECKING:
    from oomguard.remedy.policy import Policy
    from oomguard.supervise.outcome import Outcome


# A command that ends at once, as those of an array do by the thousand, is no load for SLURM while it runs.
_FIRST_SAID_AFTER_S: Final = 3.0


class RunInJob:
    """Goes along with a run as its companion.

    Args:
        job: the job.
        most: how often it may go back to the queue; 0: never.
        tells_all: whether the comment tells every attempt and end; else only those that a next start of the job needs to know of.
    """

    def __init__(self, job: Job, most: int, *, tells_all: bool = False) -> None:
        self._job, self._most, self._tells_all = job, most, tells_all
        self._is_over = threading.Event()
        self._settings: dict[str, FactValue] = {}
        self._setting = threading.Lock()
        self._latest = ""

    def begins_with(self, policy: Policy) -> tuple[Patch, ...]:
        """Return the changes that the job's last start left for this one, and say which; none of a job that starts first."""
        if not self._job.restarts or not self._most:
            return ()
        settings = state_in(self._job.comment() or "")
        if not settings:
            return ()
        log, reason = get_logger(), f"SLURM job {self._job.number}, requeued {self._job.restarts} times"
        patches, refused = changes_of(settings, policy, reason)
        if refused:
            log.warning("left out of what the job's last start had changed", settings=", ".join(refused))
        if patches:
            told = {patch.setting: arrow(patch) for patch in patches}
            log.info("the job goes on with what its last start changed", **told, restart=self._job.restarts)
        return patches

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Make an attempt the job's comment; a first one without changes once it has run for a while."""
        self._settings |= {patch.setting: patch.new for patch in patches if patch.new is not None}
        is_plain = number == 1 and not patches
        self._say(f"oomguard: attempt {number} runs", _FIRST_SAID_AFTER_S if is_plain else 0.0)

    def began(self, _number: int, _launch: Launch, _pid: int | None) -> None:
        """Nothing: what is said stands since before the command."""

    def ended(self, _attempt: Attempt) -> None:
        """Nothing: the next attempt or the end of the run says it."""

    def end(self, outcome: Outcome, text: str) -> None:
        """Make how the run ended the comment, with the changes that the job's next start begins with."""
        self._settings |= {patch.setting: patch.new for patch in outcome.left if patch.new is not None}
        self._end(text, is_over=outcome.is_stopped)

    def say_error(self, text: str) -> None:
        """Make why nothing ran the comment."""
        self._end(cut(" ".join(text.split()), MOST_COMMENT_BYTES))

    def _end(self, text: str, *, is_over: bool = False) -> None:
        with self._setting:
            self._latest = ""
            self._set(text, is_over=is_over)
        self._is_over.set()

    def requeue(self, outcome: Outcome) -> None:
        """Put the job back into the queue where its next start may fit: with changes left to make, or on a device that others leave.

        SLURM ends what runs in the job then, this process too: all else is done before.
        """
        incident = outcome.attempts[-1].incident
        if not self._most or outcome.is_stopped or incident is None or not incident.is_oom:
            return
        if not outcome.left and not is_held(incident):
            return
        log = get_logger()
        if self._job.restarts >= self._most:
            log.warning("the job is not requeued: its restarts are used up", restarts=self._job.restarts, of=self._most)
            return
        changes = {patch.setting: arrow(patch) for patch in outcome.left}
        if self._job.requeue():  # else it has said why
            log.info("the job goes back to its queue", job=self._job.number, restart=self._job.restarts + 1, **changes)

    def _say(self, text: str, after_s: float) -> None:
        """Set the comment beside the command, whose start does not wait for SLURM; of several the latest stands."""
        if not self._tells_all and not self._settings:
            return
        self._latest = text

        def say() -> None:
            self._is_over.wait(after_s)
            with self._setting:
                if self._latest == text:
                    self._set(text)

        threading.Thread(target=say, name="oomguard-slurm", daemon=True).start()

    def _set(self, text: str, *, is_over: bool = False) -> None:
        """Set the comment behind what others have made it by now; where that is not known it stays as it is."""
        if not self._tells_all and not self._settings and not self._job.restarts:
            return
        before = self._job.comment(tells=not is_over)
        if before is None or not (self._tells_all or self._settings or is_ours(before)):
            return
        comment = with_state(self._settings, text) if self._most else text
        if comment is None:
            get_logger().warning("the changes are too long for the job's comment: its next start begins without them")
        self._job.set_comment(behind(before, text if comment is None else comment), is_over=is_over)
