"""The note that an exception carries."""

from __future__ import annotations

from oomguard.core.incident import Attempt, Cause, Effect, Incident, Patch
from oomguard.guarding.advice import note
from oomguard.remedy.actions import with_actions
from oomguard.rules.rule_files import ActionTable


def test_note_says_what_happened_why_and_what_next():
    patch = Patch(
        "batch_size", 16, 8, Effect.OUTPUT_PRESERVING, "8 rows fit", as_kwarg="batch_size=8"
    )
    planned = Incident(
        "cuda_oom",
        "boom",
        causes=(
            Cause("batch_too_large", "OG301", 0.85, (), "Too many rows.", "The rows need more"),
        ),
        plan=(patch,),
        unknown=("device total: not printed",),
    )
    failed = with_actions(planned, ActionTable())

    text = note(
        failed,
        [Attempt(1, {}), Attempt(2, {"batch_size": 8}, (patch,), failed, error="OutOfMemoryError")],
    )

    assert text.splitlines()[0].startswith("oomguard: ")
    assert "why: The rows need more (batch_too_large, confidence 0.85). Too many rows." in text
    assert "tried: batch_size 16 -> 8: OutOfMemoryError" in text
    assert (
        "do first: Lower batch_size from 16 to 8 (output-preserving): batch_size=8. 8 rows fit"
        in text
    )
    assert "unknown: device total: not printed" in text


def test_a_note_hides_secrets():
    failed = Incident(
        "cuda_oom", "boom", causes=(Cause("unknown", "", 0.1, (), "api_key=abcdefgh", "t"),)
    )

    assert "abcdefgh" not in note(failed)
