"""How many requests a pool of KV cache holds."""

from __future__ import annotations

from oomguard.core.facts import Fact
from oomguard.core.incident import Incident
from oomguard.remedy.from_log import requests_in_pool, requests_in_table


def incident(phase: str = "unknown", **facts: float) -> Incident:
    return Incident(
        kind="kv_slots_exhausted",
        message="",
        phase=phase,
        facts={name: Fact(name, value, "printed") for name, value in facts.items()},
    )


def test_sequences_fall_to_three_in_four_or_to_what_fits(subtests):
    for phase, facts, value in [
        ("decode", {"running_requests": 24}, 18),
        ("decode", {"kv_slots_needed_tokens": 40}, 30),
        (
            "prefill",
            {
                "kv_slots_needed_tokens": 4096,
                "kv_cache_capacity_tokens": 40000,
                "max_model_len_tokens": 8192,
            },
            4,
        ),
        ("decode", {"running_requests": 1}, None),
        ("prefill", {"kv_slots_needed_tokens": 4096}, None),
        ("prefill", {"kv_cache_capacity_tokens": 4096, "max_model_len_tokens": 8192}, None),
    ]:
        with subtests.test(phase=phase, facts=facts, value=value):
            assert requests_in_pool(incident(phase, **facts)).value == value


def test_it_names_what_is_missing():
    assert "how many requests ran" in requests_in_pool(incident()).reason


def test_table_uses_limits_and_measured_room_in_order(subtests):
    for facts, value in [
        ({"request_slots_free": 1, "request_slots_needed": 2, "max_num_seqs": 64}, 63),
        ({"request_slots_free": 1, "request_slots_needed": 2, "running_requests": 40}, 41),
        ({"request_slots_free": 19, "request_slots_needed": 20}, 19),
        ({"request_slots_free": 1, "request_slots_needed": 2}, None),
        ({"request_slots_free": 3, "request_slots_needed": 2, "running_requests": 40}, None),
    ]:
        with subtests.test(facts=facts, value=value):
            assert requests_in_table(incident(**facts)).value == value


def test_rank_with_fewer_slots_than_its_batch_gets_more():
    figures = {"max_num_seqs": 48, "request_slots_free": 6, "request_slots_needed": 16}

    assert requests_in_table(incident(**figures, data_parallel_size=8)).value == 128
    assert requests_in_table(incident(**figures)).value == 38
