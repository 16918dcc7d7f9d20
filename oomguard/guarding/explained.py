"""An exception that leaves a guard: its diagnosis, and the notes that it leaves with."""

from __future__ import annotations

from collections.abc import Sequence

from oomguard.diagnosing import assess_all, default_rules
from oomguard.guarding.failure import add_note, annotate, scan_error
from oomguard.guarding.refused import explain_refusal
from oomguard.guarding.seen_call import seen_call
from oomguard.guarding.unwatched import unwatched
from oomguard.incident import Attempt, Diagnosis
from oomguard.remedy.policy import Policy


def explained(error: BaseException, policy: Policy, attempts: Sequence[Attempt]) -> Diagnosis | None:
    """Return the diagnosis of an exception and add it to its notes; None where it tells no memory failure.

    What comes from another process has been told by the guard there, if there was one: its notes came with it.
    """
    scanned = scan_error(error)
    if scanned.first_cause is None:
        if explain_refusal(error, attempts):
            return None
        scanned = scan_error(error, unrecognized=True)
    if scanned.first_cause is None:
        return None
    diagnosis = assess_all(scanned, default_rules(), policy, given=seen_call(error))
    if diagnosis.first_cause is None:
        return None
    if not getattr(error, "__oomguard__", False):
        annotate(error, diagnosis.first_cause)
        if "not run in parts" not in "".join(error.__notes__) and (note := unwatched(error)) is not None:
            add_note(error, note)
    return diagnosis
