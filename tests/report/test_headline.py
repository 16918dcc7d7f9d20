"""One sentence with both numbers, and the note that an exception carries."""

from __future__ import annotations

import pytest

from oomguard.facts import GIB, Fact
from oomguard.incident import KINDS, Attempt, Cause, Effect, Incident, Patch
from oomguard.report.headline import headline
from oomguard.report.note import note


def incident(kind: str, **facts) -> Incident:
    return Incident(kind, "boom", facts={name: Fact(name, value) for name, value in facts.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_without_facts_the_headline_claims_no_figure(kind):
    text = headline(incident(kind))

    assert text
    assert "unknown" not in text
    assert "GiB" not in text


@pytest.mark.parametrize(
    ("kind", "facts", "figures"),
    [
        (
            "cuda_oom",
            {"tried_bytes": 2, "device_free_bytes": 1, "device_total_bytes": 24},
            ["2.00 GiB", "1.00 GiB", "24.00 GiB"],
        ),
        (
            "kv_cache_too_small_for_max_len",
            {"kv_cache_needed_bytes": 5, "kv_cache_available_bytes": 3},
            ["5.00 GiB", "3.00 GiB"],
        ),
        (
            "startup_free_memory_below_utilization",
            {"desired_bytes": 21, "device_free_bytes": 7, "device_total_bytes": 24},
            ["21.00 GiB", "7.00 GiB", "24.00 GiB"],
        ),
    ],
)
def test_the_headline_holds_what_was_needed_and_what_was_there(kind, facts, figures):
    text = headline(incident(kind, max_model_len_tokens=4096, **{name: value * GIB for name, value in facts.items()}))

    for figure in figures:
        assert figure in text


def test_a_note_says_what_happened_why_what_was_tried_and_what_to_change():
    patch = Patch("batch_size", 16, 8, Effect.OUTPUT_PRESERVING, "8 rows fit", as_kwarg="batch_size=8")
    failed = Incident(
        "cuda_oom",
        "boom",
        causes=(Cause("batch_too_large", "OG301", 0.85, (), "Too many rows.", "The rows need more"),),
        plan=(patch,),
        unknown=("device total: not printed",),
    )

    text = note(failed, [Attempt(1, {}), Attempt(2, {"batch_size": 8}, (patch,), failed, error="OutOfMemoryError")])

    assert text.splitlines()[0].startswith("oomguard: ")
    assert "why: The rows need more (batch_too_large, confidence 0.85). Too many rows." in text
    assert "tried: batch_size 16 -> 8: OutOfMemoryError" in text
    assert "change: batch_size: batch_size=8 (output-preserving): 8 rows fit" in text
    assert "unknown: device total: not printed" in text


def test_a_note_hides_secrets():
    failed = Incident("cuda_oom", "boom", causes=(Cause("unknown", "", 0.1, (), "api_key=abcdefgh", "t"),))

    assert "abcdefgh" not in note(failed)
