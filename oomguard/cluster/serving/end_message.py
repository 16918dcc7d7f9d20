"""Summarize the end of a run for Kubernetes' termination message and SLURM's job comment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oomguard.core.errors import OomguardError, exit_status_of
from oomguard.core.log import get_logger
from oomguard.core.process_state import status_in_words

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
    notes = [
        f"  note: {drawn(text)}"
        for text in (diagnosis.notes if diagnosis is not None else ())
        if text != last.error
    ]
    return truncate_utf8("\n".join([*lines, *notes, f"  {_end(outcome)}"]), MOST_BYTES)


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
