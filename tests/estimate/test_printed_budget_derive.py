"""Facts that follow from printed ones by ``available = total * utilization - consumed``, and the budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident
from oomguard.diagnosis import assess, default_rules
from oomguard.estimate.printed_budget import derive
from oomguard.remedy.policy import Policy


def incident(kind: str = "kv_cache_none_left", **facts) -> Incident:
    return Incident(
        kind,
        "boom",
        facts={
            name: fact if isinstance(fact, Fact) else Fact(name, fact)
            for name, fact in facts.items()
        },
    )


def derived(kind: str = "kv_cache_none_left", **facts) -> Incident:
    return derive(incident(kind, **facts))


def test_consumed_is_what_was_desired_less_what_is_left():
    result = derived(desired_bytes=20 * GIB, kv_cache_available_bytes=-2 * GIB)

    assert result.number("consumed_bytes") == 22 * GIB


def test_desired_follows_from_the_total_and_the_utilization():
    result = derived(
        device_total_bytes=40 * GIB,
        gpu_memory_utilization_ratio=0.5,
        kv_cache_available_bytes=-2 * GIB,
    )

    assert result.number("consumed_bytes") == 22 * GIB
    assert result.number("break_even_utilization_ratio") == pytest.approx(22 / 40)


def test_utilization_follows_from_requested_and_total():
    share = derived(device_total_bytes=10 * GIB, desired_bytes=3 * GIB).facts[
        "gpu_memory_utilization_ratio"
    ]
    assert (share.value, share.source) == (0.3, "solved")


def test_the_printed_desired_wins_over_the_product():
    result = derived(
        device_total_bytes=40 * GIB,
        gpu_memory_utilization_ratio=0.5,
        desired_bytes=19 * GIB,
        kv_cache_available_bytes=-GIB,
    )

    assert result.number("consumed_bytes") == 20 * GIB


def test_smallest_helpful_device_gains_the_deficit_at_full_share():
    result = derived(kv_cache_available_bytes=round(-3.79 * GIB), gpu_memory_utilization_ratio=0.80)

    assert result.number("smallest_helpful_device_bytes") == pytest.approx(18.95 * GIB, rel=1e-6)


def test_at_full_utilization_no_device_size_is_claimed_to_help():
    assert (
        derived(kv_cache_available_bytes=-GIB, gpu_memory_utilization_ratio=1.0).number(
            "smallest_helpful_device_bytes"
        )
        is None
    )


def test_nothing_follows_where_something_is_left():
    result = derived(
        device_total_bytes=40 * GIB,
        gpu_memory_utilization_ratio=0.9,
        kv_cache_available_bytes=2 * GIB,
    )

    for name in ("consumed_bytes", "break_even_utilization_ratio", "smallest_helpful_device_bytes"):
        assert result.number(name) is None


def test_the_break_even_is_known_where_exactly_nothing_is_left():
    result = derived(
        device_total_bytes=40 * GIB, gpu_memory_utilization_ratio=0.5, kv_cache_available_bytes=0
    )

    assert result.number("break_even_utilization_ratio") == pytest.approx(0.5)


def test_a_given_total_is_not_said_to_be_missing():
    facts = incident(
        device_total_bytes=40 * GIB, gpu_memory_utilization_ratio=0.5, kv_cache_available_bytes=0
    )

    causes = assess(facts, default_rules(), Policy()).causes

    assert not [cause for cause in causes if "does not show the device's size" in cause.title]


def test_a_missing_fact_leaves_the_break_even_unknown(subtests):
    for missing in [
        "device_total_bytes",
        "gpu_memory_utilization_ratio",
        "kv_cache_available_bytes",
    ]:
        with subtests.test(missing=missing):
            facts = {
                "device_total_bytes": 40 * GIB,
                "gpu_memory_utilization_ratio": 0.5,
                "kv_cache_available_bytes": -GIB,
            }
            del facts[missing]

            assert derived(**facts).number("break_even_utilization_ratio") is None


def test_the_rounding_of_what_it_follows_from_is_kept():
    result = derived(
        desired_bytes=Fact("desired_bytes", 20 * GIB, slack=5.0),
        kv_cache_available_bytes=Fact("kv_cache_available_bytes", -GIB, slack=2.0),
    )

    assert result.slack("consumed_bytes") == 7.0


def test_memory_used_before_the_start_is_total_less_free():
    kind = "startup_free_memory_below_utilization"

    assert (
        derived(kind, device_total_bytes=24 * GIB, device_free_bytes=10 * GIB).number(
            "used_before_start_bytes"
        )
        == 14 * GIB
    )


def test_free_memory_after_loading_says_nothing_of_before():
    result = derived(
        "cpu_node_memory",
        device_total_bytes=24 * GIB,
        device_free_bytes=10 * GIB,
        kv_cache_available_bytes=-GIB,
    )

    assert result.number("used_before_start_bytes") is None


def test_solved_facts_say_that_they_are_solved():
    assert (
        derived(desired_bytes=2 * GIB, kv_cache_available_bytes=-GIB).facts["consumed_bytes"].source
        == "solved"
    )


def test_the_incident_given_is_not_changed():
    before = incident(desired_bytes=2 * GIB, kv_cache_available_bytes=-GIB)

    derive(before)

    assert set(before.facts) == {"desired_bytes", "kv_cache_available_bytes"}


def test_the_budget_lists_what_is_known_and_nothing_else():
    budget = derived(
        device_total_bytes=24 * GIB, model_weights_bytes=15 * GIB, cudagraph_bytes=GIB
    ).budget

    assert budget.device_total_bytes == 24 * GIB
    assert [(part.name, part.bytes, part.source) for part in budget.parts] == [
        ("weights", 15 * GIB, "printed"),
        ("CUDA graphs", GIB, "printed"),
    ]


def test_budget_shows_used_not_requested_bytes():
    sizes = {
        "device_total_bytes": 24 * GIB,
        "device_free_bytes": 10 * GIB,
        "desired_bytes": 21 * GIB,
    }
    budget = derived("startup_free_memory_below_utilization", **sizes).budget
    assert [part.bytes for part in budget.parts] == [14 * GIB, 10 * GIB]


def test_an_unknown_total_is_no_zero_in_the_budget():
    assert derived(model_weights_bytes=GIB).budget.device_total_bytes is None


def test_a_part_of_zero_bytes_is_left_out_of_the_budget():
    assert derived(model_weights_bytes=0).budget.parts == ()


def test_the_parts_of_the_budget_do_not_count_the_weights_twice():
    budget = derived(
        device_total_bytes=24 * GIB,
        gpu_memory_utilization_ratio=0.7,
        kv_cache_available_bytes=round(-0.2 * GIB),
        model_weights_bytes=15 * GIB,
    ).budget

    assert sum(part.bytes for part in budget.parts) <= 24 * GIB


@settings(deadline=None)
@given(
    total=st.integers(GIB, 200 * GIB),
    ratio=st.floats(0.01, 0.99),
    deficit=st.integers(1, 100 * GIB),
)
def test_at_the_break_even_nothing_is_left(total, ratio, deficit):
    result = derived(
        device_total_bytes=total,
        gpu_memory_utilization_ratio=ratio,
        kv_cache_available_bytes=-deficit,
    )
    consumed, even = result.number("consumed_bytes"), result.number("break_even_utilization_ratio")

    assert total * even - consumed == pytest.approx(0, abs=1 + 1e-9 * consumed)
    assert even > ratio


@settings(deadline=None)
@given(ratio=st.floats(0.01, 0.99), deficit=st.integers(1, 100 * GIB))
def test_full_utilization_just_helps_on_the_smallest_device(ratio, deficit):
    smallest = derived(
        gpu_memory_utilization_ratio=ratio, kv_cache_available_bytes=-deficit
    ).number("smallest_helpful_device_bytes")

    assert smallest * (1 - ratio) == pytest.approx(deficit, abs=1, rel=1e-9)


def test_a_container_s_own_process_is_not_counted_twice():
    told = {
        "device_total_bytes": 24 * GIB,
        "device_free_bytes": GIB // 32,
        "allocated_bytes": 22 * GIB,
        "reserved_unallocated_bytes": GIB // 4,
        "other_process_in_use_bytes": 23 * GIB,
        "tried_bytes": GIB // 16,
    }
    facts = {name: Fact(name, value) for name, value in told.items()}

    parts = {
        part.name: part.bytes for part in derive(Incident("cuda_oom", "", facts=facts)).budget.parts
    }

    assert "other processes" not in parts
    assert parts["non-torch"] == 23 * GIB - 22 * GIB - GIB // 4
    assert sum(parts.values()) <= 24 * GIB


def test_memory_of_others_is_what_is_neither_free_nor_ours():
    told = {
        "device_total_bytes": 24 * GIB,
        "device_free_bytes": GIB,
        "allocated_bytes": 4 * GIB,
        "reserved_total_bytes": 5 * GIB,
        "tried_bytes": 2 * GIB,
    }
    facts = {name: Fact(name, value) for name, value in told.items()}

    parts = {
        part.name: part.bytes for part in derive(Incident("cuda_oom", "", facts=facts)).budget.parts
    }

    assert parts["not shown as this process's"] == 18 * GIB


def test_a_device_total_below_zero_is_no_total():
    derived = derive(incident("torch_device_oom", device_total_bytes=-GIB, tried_bytes=GIB))
    assert derived.budget.device_total_bytes is None
    assert not {"device_total_bytes", "tried_ratio", "others_bytes"} & set(derived.facts)


def test_a_device_of_no_bytes_at_all_still_has_a_budget():
    assert (
        derive(incident("torch_device_oom", device_total_bytes=0, tried_bytes=GIB)).budget.parts
        == ()
    )
