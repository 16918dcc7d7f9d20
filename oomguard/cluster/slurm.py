"""Manage the comment and the requeue of a SLURM job through scontrol and squeue."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from oomguard.analyst.attempt_settings import DEVICE
from oomguard.cluster.run_end import MOST_COMMENT_BYTES, is_held, truncate_utf8
from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt, Effect, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.process import status_in_words
from oomguard.core.settings import SETTINGS, effect_of
from oomguard.engines.command import Launch
from oomguard.remedy.policy import Policy

if TYPE_CHECKING:
    from oomguard.analyst.outcome import Outcome

# A job keeps its changes between starts in its comment, in front of the text for people. A comment
# of the user stays in front of oomguard's part.

_OWN: Final = "oomguard"
# The comment also has to hold the text for people.
_MOST_STATE_BYTES: Final = 1000
_BETWEEN: Final = "; "
_OURS: Final = re.compile(rf"(?:^|{_BETWEEN}){_OWN}(?=: | \{{)")


def encode_comment(settings: Mapping[str, FactValue], text: str) -> str | None:
    """Return a comment with the changes in it, or None if they are too long.

    Args:
        settings: all changed settings. The device is left out, because the next start may differ.
        text: the text for people, which begins with ``oomguard:``.
    """
    kept = {}
    for name, value in settings.items():
        if name != DEVICE:
            kept[name] = value
    if kept:
        state = json.dumps(kept)
    else:
        state = ""
    if len(state.encode()) > _MOST_STATE_BYTES:
        return None
    if kept:
        return f"{_OWN} {state}{text.removeprefix(_OWN)}"
    return text


def merge_comment(comment: str, text: str) -> str:
    """Return a comment with oomguard's part replaced and the user's part in front."""
    ours = _OURS.search(comment)
    if ours is None:
        others = comment
    else:
        others = comment[: ours.start()]
    if others:
        return f"{others}{_BETWEEN}{text}"
    return text


def is_ours(comment: str) -> bool:
    """Return whether a comment contains oomguard's part."""
    return _OURS.search(comment) is not None


def decode_comment(comment: str) -> dict[str, FactValue]:
    """Return the changes in a comment, or nothing if this version cannot read them."""
    ours = _OURS.search(comment)
    if ours is None:
        state = ""
    else:
        state = comment[ours.end() :].removeprefix(" ")
    try:
        found, end = json.JSONDecoder().raw_decode(state)
    except (ValueError, RecursionError):
        # The user may have written a comment of this form.
        return {}
    if not isinstance(found, dict) or not state[end:].startswith(":"):
        return {}
    changes = {}
    for name, value in found.items():
        if name in SETTINGS and isinstance(value, bool | int | float | str):
            changes[name] = value
    return changes


def permitted_changes(
    settings: Mapping[str, FactValue], policy: Policy, reason: str
) -> tuple[tuple[Patch, ...], tuple[str, ...]]:
    """Return the changes to begin with, and the reasons why others are left out.

    The last start chose them under its own policy. Changes that this start's options forbid are
    left out.
    """
    patches = []
    refused = []
    for name, value in settings.items():
        patch = Patch(name, None, value, effect_of(name, None, value), reason)
        why = policy.blocks(patch, Incident("other", "", settings_complete=True))
        if policy.allow is None and patch.effect == Effect.CHANGES_OUTPUTS:
            why = f"changes outputs: --allow {patch.effect} permits it"
        if why is None:
            patches.append(patch)
        else:
            refused.append(f"{name}={value} ({why})")
    return tuple(patches), tuple(refused)


# An overloaded controller answers late. The job goes on without it.
_LIMIT_S: Final = 10.0
_NO_COMMENT: Final = "(null)"


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """Describe a SLURM job and query SLURM about it.

    Attributes:
        number: the job to requeue; for an array, only this task.
        restarts: how often it was requeued.
        path: the search path for SLURM's programs.
        component: the first component of a heterogeneous job, which holds the comment; otherwise
            None.
    """

    number: str
    restarts: int
    path: str | None
    component: str | None = None

    def comment(self, *, warns: bool = True) -> str | None:
        """Return the job's comment, or None if SLURM does not report it.

        With ``warns``, log a warning in that case.
        """
        words = ("squeue", "--noheader", "--jobs", self.number, "--format", "%i %k")
        answer = self._query(
            words, ("could not read the job comment, so it stays unchanged"), warns=warns
        )
        if answer is None:
            return None
        lines = [line.partition(" ") for line in answer.splitlines()] or [("", "", "")]
        comments = {name: text.strip() for name, _, text in lines}
        if len(comments) > 1:
            comment = comments.get(self.component or self.number)
        else:
            comment = lines[0][2].strip()
        if comment == _NO_COMMENT:
            return ""
        return comment

    def set_comment(self, text: str, *, is_over: bool = False) -> bool:
        """Set the job's comment, which ``squeue -o %k`` and ``sacct -o comment`` show.

        Args:
            line: the comment.
            is_over: whether the job may have ended, as after ``scancel``. SLURM then refuses
                comments, and no warning is logged.

        Returns:
            Whether SLURM accepted the comment.
        """
        words = (
            "scontrol",
            "update",
            f"JobId={self.component or self.number}",
            f"Comment={' '.join(text.split())}",
        )
        return self._query(words, "the job comment is not set", warns=not is_over) is not None

    def requeue(self) -> bool:
        """Requeue the job; return whether SLURM accepted that. SLURM then ends the job's
        processes.
        """
        return (
            self._query(("scontrol", "requeue", self.number), "the job is not requeued") is not None
        )

    def _query(self, words: Sequence[str], failure: str, *, warns: bool = True) -> str | None:
        name = words[0]
        not_done = partial(_not_done, warns=warns)
        program = shutil.which(name, path=self.path)
        if program is None:
            return not_done(failure, f"no {name} on PATH")
        try:
            ran = subprocess.run(
                [program, *words[1:]],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            # The run must end even if SLURM's controller does not answer.
            return not_done(failure, f"{name} did not end within {_LIMIT_S:.0f} s")
        except (OSError, ValueError) as error:
            return not_done(failure, str(error))
        if ran.returncode:
            output = " ".join((ran.stderr or ran.stdout).split())[:200]
            ended = f"{name} ended with {status_in_words(ran.returncode)}"
            return not_done(failure, f"{ended}: {output}" if output else ended)
        return ran.stdout.strip()


def job_of(environ: Mapping[str, str], failure: str) -> SlurmJob | None:
    """Return the job of this process, or None with a warning outside of a job.

    Args:
        environ: the environment variables.
        failure: the log event to use without a job.
    """
    number = environ.get("SLURM_JOB_ID")
    if number is None:
        _not_done(failure, "SLURM_JOB_ID is not set")
        return None
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    if restarts.isdigit():
        times = int(restarts)
    else:
        times = 0
    # In an array, SLURM applies the number of the last task to all tasks, because it is also the
    # array's number. In a heterogeneous job, the first component holds the comment, and the job is
    # requeued as a whole. A job that an array task submits inherits its variables.
    if environ.get("SLURM_ARRAY_JOB_ID") == number and "SLURM_ARRAY_TASK_ID" in environ:
        number = f"{number}_{environ['SLURM_ARRAY_TASK_ID']}"
    if environ.get("SLURM_JOB_ID_HET_GROUP_0") == number:
        component = f"{number}+0"
    else:
        component = None
    return SlurmJob(number, times, environ.get("PATH"), component)


def _not_done(failure: str, reason: str, *, warns: bool = True) -> str | None:
    """Log what was not done, and return None as SLURM's missing answer."""
    (get_logger().warning if warns else get_logger().debug)(failure, reason=reason)
    return None


# Commands that end at once, such as thousands of array tasks, must not put load on SLURM.
_FIRST_SAID_AFTER_S: Final = 3.0


class RunInJob:
    """Report a run in its SLURM job; implements a companion.

    Args:
        job: the job.
        most: the largest number of requeues; 0: never.
        shows_all: whether the comment shows every attempt and end. If False, it holds only what the
            job's next start needs.
    """

    def __init__(self, job: SlurmJob, most: int, *, shows_all: bool = False) -> None:
        self._job = job
        self._most = most
        self._shows_all = shows_all
        self._is_over = threading.Event()
        self._settings: dict[str, FactValue] = {}
        self._setting = threading.Lock()
        self._latest = ""

    def begins_with(self, policy: Policy) -> tuple[Patch, ...]:
        """Return the changes that the job's last start left, and log them."""
        if not self._job.restarts or not self._most:
            return ()
        settings = decode_comment(self._job.comment() or "")
        if not settings:
            return ()
        log = get_logger()
        reason = f"SLURM job {self._job.number}, requeued {self._job.restarts} times"
        patches, refused = permitted_changes(settings, policy, reason)
        if refused:
            log.warning("ignored some changes of the job's last start", settings=", ".join(refused))
        if patches:
            changes = {patch.setting: patch.change for patch in patches}
            log.info(
                "beginning with the changes of the job's last start",
                **changes,
                restart=self._job.restarts,
            )
        return patches

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Write an attempt into the comment; a first attempt without changes waits a while."""
        self._remember(patches)
        is_plain = number == 1 and not patches
        self._say(
            f"oomguard: attempt {number} is running", _FIRST_SAID_AFTER_S if is_plain else 0.0
        )

    def began(self, _number: int, _launch: Launch, _pid: int | None) -> None:
        """Do nothing, because the comment is written before the command starts."""

    def ended(self, _attempt: Attempt) -> None:
        """Do nothing, because the next attempt or the end of the run writes the comment."""

    def _remember(self, patches: Iterable[Patch]) -> None:
        for patch in patches:
            if patch.new is not None:
                self._settings[patch.setting] = patch.new

    def end(self, outcome: Outcome, text: str) -> None:
        """Write the end of the run and the changes for the job's next start into the comment."""
        self._remember(outcome.left)
        self._end(text, is_over=outcome.is_stopped)

    def report_error(self, text: str) -> None:
        """Write into the comment why nothing ran."""
        self._end(truncate_utf8(" ".join(text.split()), MOST_COMMENT_BYTES))

    def _end(self, text: str, *, is_over: bool = False) -> None:
        with self._setting:
            self._latest = ""
            self._set(text, is_over=is_over)
        self._is_over.set()

    def requeue(self, outcome: Outcome) -> None:
        """Requeue the job if its next start may fit, with more changes or on a free device.

        SLURM then ends the job's processes, this one too, so call this last.
        """
        incident = outcome.attempts[-1].incident
        if not self._most or outcome.is_stopped or incident is None or not incident.is_oom:
            return
        if not outcome.left and not is_held(incident):
            return
        log = get_logger()
        if self._job.restarts >= self._most:
            log.warning(
                "did not requeue the job: it was requeued as often as --slurm-requeue permits",
                restarts=self._job.restarts,
                of=self._most,
            )
            return
        # SLURM starts the same script again. The comment carries the changes to it.
        changes = {patch.setting: patch.change for patch in outcome.left}
        # Otherwise a warning was logged.
        if self._job.requeue():
            log.info(
                "requeuing the job",
                job=self._job.number,
                restart=self._job.restarts + 1,
                **changes,
            )

    def _say(self, text: str, after_s: float) -> None:
        """Set the comment in a thread, so that the command need not wait; the latest one wins."""
        if not self._shows_all and not self._settings:
            return
        self._latest = text

        def say() -> None:
            self._is_over.wait(after_s)
            with self._setting:
                if self._latest == text:
                    self._set(text)

        threading.Thread(target=say, name="oomguard-slurm", daemon=True).start()

    def _set(self, text: str, *, is_over: bool = False) -> None:
        """Set oomguard's part of the comment, or nothing if the current comment is unknown."""
        if not self._shows_all and not self._settings and not self._job.restarts:
            return
        before = self._job.comment(warns=not is_over)
        if before is None or not (self._shows_all or self._settings or is_ours(before)):
            return
        if self._most:
            comment = encode_comment(self._settings, text)
        else:
            comment = text
        if comment is None:
            get_logger().warning(
                "the changes are too long for the job comment, so the next start begins without "
                "them"
            )
        self._job.set_comment(
            merge_comment(before, text if comment is None else comment), is_over=is_over
        )
