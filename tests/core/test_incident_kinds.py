"""One sentence for each kind of failure, with both numbers where they are known."""

from __future__ import annotations

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import KINDS, Incident
from support.each import each


def incident(kind: str, **facts) -> Incident:
    return Incident(kind, "boom", facts={name: Fact(name, value) for name, value in facts.items()})


@each("kind", KINDS)
def test_without_facts_the_headline_claims_no_figure(kind):
    text = incident(kind).headline

    assert text
    assert "unknown" not in text
    assert "GiB" not in text


@each(
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
    text = incident(
        kind, max_model_len_tokens=4096, **{name: value * GIB for name, value in facts.items()}
    ).headline

    for figure in figures:
        assert figure in text
