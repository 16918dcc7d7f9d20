"""A failure inside the process: what its exception says, what it held, and the note it leaves with."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping, Sequence

from oomguard.diagnosing import default_rules
from oomguard.incident import Attempt, Diagnosis, Incident, SettingInForce
from oomguard.observe.exceptions import chain, exception_lines, may_be_oom
from oomguard.observe.scan import scan
from oomguard.report.note import note


def scan_error(error: BaseException, settings: Mapping[str, SettingInForce] | None = None) -> Diagnosis:
    """Return what an exception's messages say, not yet explained; no incidents where its type cannot be a memory failure."""
    if not may_be_oom(error):
        return Diagnosis(type(error).__name__)
    return scan(exception_lines(error), default_rules(), type(error).__name__, given=settings)


def row_bytes_at_failure(failure: Incident, base_bytes: int | None, rows: int) -> int | None:
    """Return the bytes that one row held when the call failed, by the live bytes in the message; None where it has none.

    The row would have gone on to more. ``base_bytes`` are those alive before the call.
    """
    tried = failure.number("tried_bytes")
    live = failure.number("allocated_bytes") or failure.number("process_in_use_bytes")
    if base_bytes is None or tried is None or live is None:
        return None
    return max(1, round((live + tried - base_bytes) / rows))


def clear(error: BaseException) -> None:
    """Drop the locals of the frames in an exception's traceback and its chain: they hold the failed call's tensors."""
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def annotate(error: BaseException, incident: Incident, attempts: Sequence[Attempt] = ()) -> None:
    """Add the diagnosis to an exception's notes, and mark it as explained."""
    with contextlib.suppress(AttributeError, TypeError):
        error.add_note(note(incident, attempts))
        error.__oomguard__ = True  # type: ignore[attr-defined]
