"""The SLURM job that a run is: its comment, and its place in the queue, through scontrol and squeue."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from oomguard.exit_status import status_in_words
from oomguard.log import get_logger

_LIMIT_S: Final = 10.0
_NO_COMMENT: Final = "(null)"


@dataclass(frozen=True, slots=True)
class Job:
    """A job, and what asks SLURM about it.

    Attributes:
        number: what goes back to the queue: the job, of an array this task alone.
        restarts: how often it went back to the queue.
        path: where SLURM's programs are looked for.
        component: of a heterogeneous job the first component, whose comment is ours; None: the job is none.
    """

    number: str
    restarts: int
    path: str | None
    component: str | None = None

    def comment(self, *, tells: bool = True) -> str | None:
        """Return the job's comment, empty without one; None where SLURM does not tell it, with a line that says so if it ``tells``."""
        words = ("squeue", "--noheader", "--jobs", self.number, "--format", "%i %k")
        said = self._said(words, "the job's comment is not read, and stays as it is", tells=tells)
        if said is None:
            return None
        lines = [line.partition(" ") for line in said.splitlines()] or [("", "", "")]
        told = {name: text.strip() for name, _, text in lines}
        comment = told.get(self.component or self.number) if len(told) > 1 else lines[0][2].strip()
        return "" if comment == _NO_COMMENT else comment

    def set_comment(self, text: str, *, is_over: bool = False) -> bool:
        """Make a line the job's comment, which ``squeue -o %k`` and ``sacct -o comment`` show; return whether it is.

        ``is_over``: the job may have ended, as after ``scancel``. SLURM takes no comment then, and no word is made of that.
        """
        words = ("scontrol", "update", f"JobId={self.component or self.number}", f"Comment={' '.join(text.split())}")
        return self._said(words, "the job's comment is not set", tells=not is_over) is not None

    def requeue(self) -> bool:
        """Put the job back into its queue; return whether it is there. SLURM then ends what runs in it."""
        return self._said(("scontrol", "requeue", self.number), "the job is not requeued") is not None

    def _said(self, words: Sequence[str], failure: str, *, tells: bool = True) -> str | None:
        name, not_done = words[0], partial(_not_done, tells=tells)
        program = shutil.which(name, path=self.path)
        if program is None:
            return not_done(failure, f"no {name} on PATH")
        try:
            ran = subprocess.run(
                [program, *words[1:]], capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return not_done(failure, f"{name} did not end within {_LIMIT_S:.0f} s")
        except (OSError, ValueError) as error:
            return not_done(failure, str(error))
        if ran.returncode:
            said = " ".join((ran.stderr or ran.stdout).split())[:200]
            ended = f"{name} ended with {status_in_words(ran.returncode)}"
            return not_done(failure, f"{ended}: {said}" if said else ended)
        return ran.stdout.strip()


def job_of(environ: Mapping[str, str], failure: str) -> Job | None:
    """Return the job that this process is in; None outside one, with a line that says so.

    Args:
        environ: its variables.
        failure: what is not done without a job.
    """
    number = environ.get("SLURM_JOB_ID")
    if number is None:
        _not_done(failure, "SLURM_JOB_ID is not set")
        return None
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    times = int(restarts) if restarts.isdigit() else 0
    # SLURM takes the number of an array's last task for all tasks, as it is the array's too, and that of a heterogeneous job's first
    # component for the comments of all, which goes back only as a whole. A job that a task of an array submits has its variables.
    if environ.get("SLURM_ARRAY_JOB_ID") == number and "SLURM_ARRAY_TASK_ID" in environ:
        number = f"{number}_{environ['SLURM_ARRAY_TASK_ID']}"
    component = f"{number}+0" if environ.get("SLURM_JOB_ID_HET_GROUP_0") == number else None
    return Job(number, times, environ.get("PATH"), component)


def _not_done(failure: str, reason: str, *, tells: bool = True) -> str | None:
    """Log what is not done, and return None for what SLURM would have said."""
    (get_logger().warning if tells else get_logger().debug)(failure, reason=reason)
    return None
