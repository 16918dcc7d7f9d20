"""How a run ended, in a few lines, for who reads no log: Kubernetes' termination message, and SLURM's comment of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oomguard.errors import OomguardError, exit_status_of
from oomguard.exit_status import status_in_words
from oomguard.log import get_logger

if TYPE_CHECKING:
    from oomguard.supervise.outcome import Outcome

# Kubernetes takes as much of a container's message: kubelet, MaxContainerTerminationMessageLength.
MOST_BYTES: Final = 4096
DEFAULT_MESSAGE: Final = Path("/dev/termination-log")
_IN_A_POD: Final = "KUBERNETES_SERVICE_HOST"
_JOB: Final = "SLURM_JOB_ID"
_MOST_COMMENT: Final = 250
_SCONTROL_S: Final = 10.0


def message_of(outcome: Outcome) -> str:
    """Return how the run ended: what, why with numbers, what was tried, what to change; at most ``MOST_BYTES``."""
    from oomguard.report.note import note, tried
    from oomguard.report.presentable import drawn

    last = outcome.attempts[-1]
    diagnosis = outcome.diagnosis
    incident = diagnosis.first_cause if diagnosis is not None else None
    if last.incident is not None and incident is not None:
        lines = [note(incident, outcome.attempts, of_command=True)]
    else:
        lines = [drawn(f"oomguard: {last.error or 'ended'}"), *tried(outcome.attempts)]
    notes = [
        f"  note: {drawn(text)}" for text in (diagnosis.notes if diagnosis is not None else ()) if text != last.error
    ]
    return cut("\n".join([*lines, *notes, f"  {_end(outcome)}"]), MOST_BYTES)


def comment_of(outcome: Outcome) -> str:
    """Return how the run ended in one line of at most ``_MOST_COMMENT`` bytes: what first, and the status in any case."""
    from oomguard.report.presentable import drawn

    last, end = outcome.attempts[-1], _end(outcome)
    why = last.incident.headline if last.incident is not None else last.error
    if not why or end.startswith(why):
        return f"oomguard: {end}"
    left = _MOST_COMMENT - len(f"oomguard: ; {end}".encode())
    return f"oomguard: {cut(' '.join(drawn(why).split()), left)}; {end}"


def _end(outcome: Outcome) -> str:
    count = len(outcome.attempts)
    return f"{status_in_words(outcome.status)} after {count} attempt{'s' if count > 1 else ''}"


def message_of_error(error: OomguardError) -> str:
    """Return why nothing ran: what is wrong, and what to do; at most ``MOST_BYTES``."""
    from oomguard.report.presentable import drawn

    hint = getattr(error, "hint", None)
    lines = [f"oomguard: {drawn(str(error))}", *([f"  {drawn(hint)}"] if hint else [])]
    return cut("\n".join([*lines, f"  {status_in_words(exit_status_of(error))}"]), MOST_BYTES)


def cut(text: str, most_bytes: int) -> str:
    """Return a text of at most so many bytes of UTF-8, cut between characters."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return text
    return data[: most_bytes - 3].decode("utf-8", "ignore") + "…"


def message_place(asked: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return where the termination message goes: where it was asked for, else in a pod where Kubernetes reads it."""
    if asked is not None:
        return Path(asked)
    in_a_pod = _IN_A_POD in environ and DEFAULT_MESSAGE.is_file() and os.access(DEFAULT_MESSAGE, os.W_OK)
    return DEFAULT_MESSAGE if in_a_pod else None


def leave_message(place: Path, text: str) -> None:
    """Write how a run ended that failed; a place that cannot be written is told."""
    try:
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        get_logger().warning("the termination message could not be written", path=str(place), reason=reason)


def set_job_comment(text: str, environ: Mapping[str, str]) -> None:
    """Make a line the comment of the SLURM job that this is, which ``squeue`` and ``sacct`` show; where that fails it is told."""
    import shutil
    import subprocess  # every run ends here, few in a job of SLURM that asks for a comment

    job, scontrol = environ.get(_JOB), shutil.which("scontrol", path=environ.get("PATH"))
    if job is None or scontrol is None:
        reason = f"{_JOB} is not set" if job is None else "no scontrol on PATH"
        get_logger().warning("the job's comment is not set", reason=reason)
        return
    line = cut(" ".join(text.split()), _MOST_COMMENT)
    command = [scontrol, "update", f"JobId={job}", f"Comment={line}"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S, check=False)
    except subprocess.TimeoutExpired:
        get_logger().warning("the job's comment is not set", reason=f"scontrol did not end within {_SCONTROL_S:.0f} s")
        return
    except (OSError, ValueError) as error:
        get_logger().warning("the job's comment is not set", reason=str(error))
        return
    if ran.returncode:
        said = " ".join((ran.stderr or ran.stdout).split())[:200]
        ended = f"scontrol ended with {status_in_words(ran.returncode)}"
        get_logger().warning("the job's comment is not set", reason=f"{ended}: {said}" if said else ended)
