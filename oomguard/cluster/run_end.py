"""Report the end of a run: status by cause, termination message, comment of a SLURM job."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import OomguardError, exit_status_of
from oomguard.core.incident import Incident
from oomguard.core.log import get_logger
from oomguard.core.process import status_in_words

if TYPE_CHECKING:
    from oomguard.analyst.outcome import Outcome

# Kubernetes reads this much of a container's message: kubelet,
# MaxContainerTerminationMessageLength.
MOST_BYTES: Final = 4096
DEFAULT_MESSAGE: Final = Path("/dev/termination-log")
_IN_A_POD: Final = "KUBERNETES_SERVICE_HOST"
MOST_COMMENT_BYTES: Final = 250


def message_of(outcome: Outcome) -> str:
    """Return a summary of at most ``MOST_BYTES``: what happened, why, the attempts, what to
    change.
    """
    from oomguard.core.presentable import drawn
    from oomguard.guarding.advice import note, tried

    last = outcome.attempts[-1]
    diagnosis = outcome.diagnosis
    if diagnosis is not None:
        incident = diagnosis.first_cause
    else:
        incident = None
    if last.incident is not None and incident is not None:
        lines = [note(incident, outcome.attempts, of_command=True)]
    else:
        lines = [drawn(f"oomguard: {last.error or 'ended'}"), *tried(outcome.attempts)]
    if diagnosis is not None:
        for text in diagnosis.notes:
            if text != last.error:
                lines.append(f"  note: {drawn(text)}")
    return truncate_utf8("\n".join([*lines, f"  {_end(outcome)}"]), MOST_BYTES)


def comment_of(outcome: Outcome) -> str:
    """Return a summary in one line of at most ``MOST_COMMENT_BYTES`` bytes.

    What happened comes first, and the line always contains the status.
    """
    from oomguard.core.presentable import drawn

    last = outcome.attempts[-1]
    end = _end(outcome)
    if last.incident is not None:
        why = last.incident.headline
    else:
        why = last.error
    if not why or end.startswith(why):
        return f"oomguard: {end}"
    left = MOST_COMMENT_BYTES - len(f"oomguard: ; {end}".encode())
    return f"oomguard: {truncate_utf8(' '.join(drawn(why).split()), left)}; {end}"


def _end(outcome: Outcome) -> str:
    count = len(outcome.attempts)
    return f"{status_in_words(outcome.status)} after {count} attempt{'s' if count > 1 else ''}"


def message_of_error(error: OomguardError) -> str:
    """Return why nothing ran and what to do, in at most ``MOST_BYTES``."""
    from oomguard.core.presentable import drawn

    hint = getattr(error, "hint", None)
    lines = [f"oomguard: {drawn(str(error))}", *([f"  {drawn(hint)}"] if hint else [])]
    return truncate_utf8(
        "\n".join([*lines, f"  {status_in_words(exit_status_of(error))}"]), MOST_BYTES
    )


def truncate_utf8(text: str, most_bytes: int) -> str:
    """Cut a text to a number of UTF-8 bytes, between characters."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return text
    return data[: most_bytes - 3].decode("utf-8", "ignore") + "…"


def message_place(asked: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the path of the termination message, or None if nobody needs one.

    It is the user's path, or in a pod the path that Kubernetes reads.
    """
    if asked is not None:
        return Path(asked)
    in_a_pod = (
        _IN_A_POD in environ and DEFAULT_MESSAGE.is_file() and os.access(DEFAULT_MESSAGE, os.W_OK)
    )
    # Kubernetes shows this file's text as the reason of the container's end.
    if in_a_pod:
        return DEFAULT_MESSAGE
    return None


def leave_message(place: Path, text: str) -> None:
    """Write the summary of a failed run; log a warning if the path is not writable."""
    try:
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        get_logger().warning(
            "the termination message could not be written", path=str(place), reason=reason
        )


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
