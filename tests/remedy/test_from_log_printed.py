"""The solvers: a value that fits on the unfavourable side of every rounding, or the name of what is missing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.facts import GIB, MIB, Fact
from oomguard.core.incident import Incident
from oomguard.estimate.constants import most_free_ratio, others_margin_ratio
from oomguard.remedy.from_log import (
    RAISE_MARGIN_CPU_RATIO,
    RAISE_MARGIN_RATIO,
    SOLVERS,
    UNKNOWN_KV_RATIO,
    kv_bytes_for_max_len,
    kv_bytes_for_tried,
    kv_bytes_within_free,
    printed_estimate,
    utilization_for_kv_cache,
    utilization_for_max_len,
    utilization_within_free,
)
from oomguard.remedy.solution import Solution


def incident(**facts) -> Incident:
    return Incident(
        "cuda_oom",
        "boom",
        facts={
            name: fact if isinstance(fact, Fact) else Fact(name, fact)
            for name, fact in facts.items()
        },
    )


def printed(name: str, gib: float, slack_gib: float) -> Fact:
    return Fact(name, round(gib * GIB), slack=slack_gib * GIB)


sizes = st.integers(0, 200 * GIB)


# Missing facts --------------------------------------------------------------------------------------------------

MISSING = {
    "kv_bytes_for_reserve": "host's free memory",
    "utilization_for_reserve": "host's free memory",
    "context_for_buffers": "each buffer",
    "printed_estimate": "max_model_len",
    "blocks_for_max_len": "KV blocks",
    "kv_bytes_for_max_len": "KV need",
    "utilization_for_max_len": "KV need",
    "utilization_for_kv_cache": "available KV cache memory",
    "utilization_within_free": "free memory",
    "kv_bytes_for_tried": "kv_cache_memory_bytes",
    "kv_bytes_within_free": "free memory",
    "utilization_for_tried": "device total",
    "ranks_for_weights": "the size of the weights",
    "rows_that_fit": "row_bytes",
    "sequences_for_warmup": "max_num_seqs",
    "graphs_that_were_captured": "how many of them were captured",
    "host_cache_within_free": "what the host has free",
    "host_ratio_within_free": "what the host has free",
    "page_for_requests": "how many requests needed a page",
    "requests_in_pool": "how many requests ran",
    "requests_in_table": "the free and the requested slots",
    "static_share_for_pool": "free before and after loading",
    "static_share_for_tried": "device total",
    "step_tokens_for_tried": "peak activation",
    "without_graph_estimate": "memory of the CUDA graphs",
    "without_graphs": "memory of the CUDA graphs",
}


# An unknown version of torch is a new one.
WITHOUT_FACTS = "options_for_pieces"


def test_every_solver_has_its_missing_facts_tested():
    assert set(MISSING) == set(SOLVERS) - {WITHOUT_FACTS}


def test_missing_facts_solve_nothing_and_are_named(subtests):
    for name, missing in MISSING.items():
        with subtests.test(name=name):
            solution = SOLVERS[name](incident())

            assert solution.value is None
            assert solution.reason
            assert any(missing in text for text in solution.unknown)


def test_without_the_total_the_rise_is_told_as_a_fraction_of_it(subtests):
    for solver in [utilization_for_max_len, utilization_for_kv_cache]:
        with subtests.test(solver=solver):
            solution = solver(
                incident(
                    kv_cache_needed_bytes=0,
                    kv_cache_available_bytes=round(-3.79 * GIB),
                    gpu_memory_utilization_ratio=0.8,
                )
            )

            assert solution.value is None
            assert "3.79 GiB / device total, which is not printed" in solution.reason
            assert solution.unknown == ("device total: not printed",)


def test_rise_is_shown_from_an_unknown_utilization():
    solution = utilization_for_kv_cache(
        incident(kv_cache_available_bytes=-2 * GIB, device_total_bytes=20 * GIB)
    )

    assert solution.value is None
    assert "= 0.10 from a value that is not printed" in solution.reason


def test_unsolved_reason_names_the_smallest_helpful_card():
    solution = utilization_for_kv_cache(
        incident(kv_cache_available_bytes=-2 * GIB, smallest_helpful_device_bytes=19 * GIB)
    )

    assert "no utilization up to 1.0 helps on a card below 19.00 GiB" in solution.reason


# max_model_len --------------------------------------------------------------------------------------------------


def test_the_engine_s_own_estimate_comes_first():
    solution = printed_estimate(
        incident(
            max_model_len_tokens=40960,
            estimated_max_model_len_tokens=26624,
            kv_cache_capacity_tokens=99,
            kv_cache_needed_bytes=5 * GIB,
            kv_cache_available_bytes=round(3.25 * GIB),
        )
    )

    assert solution.value == 26624
    assert solution.freed_bytes == 5 * GIB * (40960 - 26624) // 40960
    assert solution.predicts == {"kv_cache_capacity_tokens": 26624}


def test_the_capacity_comes_next():
    assert (
        printed_estimate(incident(max_model_len_tokens=32768, kv_cache_capacity_tokens=14352)).value
        == 14352
    )


def test_the_proportion_keeps_one_block_back():
    solution = printed_estimate(
        incident(
            max_model_len_tokens=4096,
            kv_cache_needed_bytes=4 * GIB,
            kv_cache_available_bytes=2 * GIB,
        )
    )

    assert solution.value == 2048 - 128


def test_the_proportion_stays_on_the_safe_side_of_the_rounding():
    exact = incident(
        max_model_len_tokens=40960, kv_cache_needed_bytes=5 * GIB, kv_cache_available_bytes=3 * GIB
    )
    rounded = incident(
        max_model_len_tokens=40960,
        kv_cache_needed_bytes=printed("kv_cache_needed_bytes", 5, 0.5),
        kv_cache_available_bytes=printed("kv_cache_available_bytes", 3, 0.5),
    )

    assert printed_estimate(rounded).value < printed_estimate(exact).value


def test_a_need_of_zero_gives_no_proportion():
    found = printed_estimate(
        incident(max_model_len_tokens=32768, kv_cache_needed_bytes=0, kv_cache_available_bytes=GIB)
    )
    assert found.value is None
    assert "rounds to 0" in found.reason


def test_a_proportion_of_a_rounded_zero_is_not_solved():
    solution = printed_estimate(
        incident(
            max_model_len_tokens=40960,
            kv_cache_needed_bytes=5 * GIB,
            kv_cache_available_bytes=printed("kv_cache_available_bytes", 0, 0.05),
        )
    )

    assert solution.value is None
    assert "rounds to 0" in solution.reason


def test_less_than_a_block_is_not_solved():
    solution = printed_estimate(
        incident(
            max_model_len_tokens=4096, kv_cache_needed_bytes=4 * GIB, kv_cache_available_bytes=MIB
        )
    )

    assert solution.value is None


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 100 * GIB), st.floats(0.001, 0.999))
def test_the_proportional_length_fits_in_what_is_left(length, needed, share):
    left = round(needed * share)

    value = printed_estimate(
        incident(
            max_model_len_tokens=length, kv_cache_needed_bytes=needed, kv_cache_available_bytes=left
        )
    ).value

    assert value is None or (0 < value < length and needed * value <= left * length)


def test_a_length_that_already_fits_is_not_raised():
    value = printed_estimate(
        incident(max_model_len_tokens=4096, estimated_max_model_len_tokens=8192)
    ).value

    assert value is None or value <= 4096


# kv_cache_memory_bytes ------------------------------------------------------------------------------------------


def test_byte_count_for_a_length_is_min_of_need_and_proportion():
    by_need = incident(kv_cache_needed_bytes=1_000_000)
    by_both = incident(
        kv_cache_needed_bytes=21474836,
        max_model_len_tokens=32768,
        estimated_max_model_len_tokens=1792,
        kv_cache_memory_bytes=1_000_000,
    )

    assert kv_bytes_for_max_len(by_need).value == 1_010_000
    assert kv_bytes_for_max_len(by_both).value == 18_285_715


@settings(deadline=None)
@given(needed=st.integers(1, 100 * GIB), slack=st.floats(0, GIB))
def test_the_byte_count_covers_the_need_s_upper_edge(needed, slack):
    fact = Fact("kv_cache_needed_bytes", needed, slack=slack)

    assert kv_bytes_for_max_len(incident(kv_cache_needed_bytes=fact)).value >= needed + slack


@settings(deadline=None)
@given(
    block_tokens=st.sampled_from((16, 32, 64, 128)),
    groups=st.integers(1, 5),
    block_bytes=st.integers(1, GIB),
    held=st.integers(1, 4000),
    longer=st.integers(1, 10**6),
)
def test_byte_count_for_a_length_covers_blocks_and_overhead(
    block_tokens, groups, block_bytes, held, longer
):
    fits_tokens = held * block_tokens
    length = fits_tokens + longer
    given_bytes = (groups * held + 1) * block_bytes
    needed_bytes = groups * math.ceil(length / block_tokens) * block_bytes
    facts = {
        "max_model_len_tokens": length,
        "estimated_max_model_len_tokens": fits_tokens,
        "kv_cache_memory_bytes": given_bytes,
    }

    for known in (facts, facts | {"kv_cache_needed_bytes": needed_bytes}):
        assert kv_bytes_for_max_len(incident(**known)).value >= needed_bytes + block_bytes


def test_the_byte_count_within_free_keeps_a_margin():
    facts = {
        "device_free_bytes": 10 * GIB,
        "kv_cache_requested_bytes": 12 * GIB,
        "device_total_bytes": 20 * GIB,
    }

    solution = kv_bytes_within_free(incident(**facts))

    assert solution.value == int(10 * GIB - others_margin_ratio() * 20 * GIB)
    assert solution.freed_bytes == 12 * GIB - solution.value


def test_host_cache_leaves_at_least_a_gigabyte_free():
    """All its pages are there at once, and the kernel ends the worker whose start needs one more."""
    facts = {
        "device_free_bytes": 10 * GIB,
        "kv_cache_requested_bytes": 12 * GIB,
        "device_total_bytes": 20 * GIB,
    }
    assert (
        1 * GIB < 10 * GIB - kv_bytes_within_free(incident(**facts, on_cpu=True)).value < 1.5 * GIB
    )


@settings(deadline=None)
@given(free=sizes, asked=sizes, total=sizes)
def test_the_byte_count_within_free_is_below_what_is_free(free, asked, total):
    facts = {
        "device_free_bytes": free,
        "kv_cache_requested_bytes": asked,
        "device_total_bytes": max(total, free),
    }

    value = kv_bytes_within_free(incident(**facts)).value

    assert value is None or 0 < value <= free


def test_a_byte_count_within_free_is_never_raised():
    solution = kv_bytes_within_free(
        incident(device_free_bytes=10 * GIB, kv_cache_requested_bytes=GIB)
    )

    assert solution.value is None or solution.value <= GIB


# gpu_memory_utilization, up -------------------------------------------------------------------------------------


def test_the_utilization_rises_by_what_one_request_lacks():
    facts = {
        "kv_cache_needed_bytes": 16 * GIB,
        "kv_cache_available_bytes": 15 * GIB,
        "device_total_bytes": 80 * GIB,
        "gpu_memory_utilization_ratio": 0.8,
    }

    solution = utilization_for_max_len(incident(**facts))

    lacking = 1 / 80
    assert 0.8 + lacking < solution.value < 0.8 + lacking + 0.06
    assert solution.predicts["kv_cache_available_bytes"] == pytest.approx(
        (solution.value - 0.8) * 80 * GIB + 15 * GIB
    )


def test_utilization_rises_to_hold_one_request():
    facts = {
        "kv_cache_available_bytes": -GIB,
        "device_total_bytes": 80 * GIB,
        "gpu_memory_utilization_ratio": 0.5,
        "kv_cache_needed_bytes": GIB,
        "max_model_len_tokens": 8192,
    }

    solution = utilization_for_kv_cache(incident(**facts))

    assert solution.value * 80 * GIB - 41 * GIB >= GIB
    assert solution.value * 80 * GIB - 41 * GIB <= 1.5 * GIB


def test_the_margin_is_larger_on_the_cpu_backend():
    facts = {
        "kv_cache_available_bytes": -GIB,
        "device_total_bytes": 80 * GIB,
        "gpu_memory_utilization_ratio": 0.5,
    }

    assert RAISE_MARGIN_CPU_RATIO > RAISE_MARGIN_RATIO
    assert (
        utilization_for_kv_cache(incident(**facts, on_cpu=True)).value
        > utilization_for_kv_cache(incident(**facts)).value
    )


def test_no_utilization_above_the_limit_is_proposed():
    solution = utilization_for_kv_cache(
        incident(
            kv_cache_available_bytes=round(-3.79 * GIB),
            gpu_memory_utilization_ratio=0.8,
            device_total_bytes=8 * GIB,
        )
    )

    assert solution.value is None
    assert "to 1.27 before any KV cache" in solution.reason
    assert "no utilization up to 1.0 helps" in solution.reason


def test_no_utilization_above_what_is_free_is_proposed():
    facts = {
        "kv_cache_available_bytes": -GIB,
        "device_total_bytes": 80 * GIB,
        "gpu_memory_utilization_ratio": 0.5,
        "device_free_bytes": 41 * GIB,
    }

    solution = utilization_for_kv_cache(incident(**facts))

    assert solution.value is None
    assert "only 0.51 of the device is free" in solution.reason


def test_a_need_that_is_not_known_takes_no_more_than_is_free():
    facts = {
        "kv_cache_available_bytes": -GIB,
        "device_total_bytes": 80 * GIB,
        "gpu_memory_utilization_ratio": 0.5,
    }

    tight = utilization_for_kv_cache(incident(**facts, device_free_bytes=45 * GIB)).value
    roomy = utilization_for_kv_cache(incident(**facts, device_free_bytes=79 * GIB)).value

    assert tight == 0.562
    assert tight < roomy <= 0.5 + 1 / 80 + UNKNOWN_KV_RATIO + 0.06


@settings(deadline=None)
@given(
    total=st.integers(GIB, 200 * GIB),
    ratio=st.floats(0.01, 1.0),
    deficit=st.integers(0, 200 * GIB),
    free=st.none() | st.floats(0, 1),
    on_cpu=st.booleans(),
    slack=st.floats(0, 0.05 * GIB),
)
def test_utilization_is_never_lowered_for_a_negative_kv_cache(
    total, ratio, deficit, free, on_cpu, slack
):
    facts = {
        "device_total_bytes": total,
        "gpu_memory_utilization_ratio": ratio,
        "kv_cache_available_bytes": Fact("kv_cache_available_bytes", -deficit, slack=slack),
        **({} if free is None else {"device_free_bytes": round(total * free)}),
        **({"on_cpu": True} if on_cpu else {}),
    }

    solution = utilization_for_kv_cache(incident(**facts))

    if solution.value is None:
        assert solution.reason
        return
    assert ratio < solution.value <= most_free_ratio()
    assert solution.value * total - (total * ratio + deficit + slack) >= 0
    assert solution.predicts["kv_cache_available_bytes"] >= 0
    assert free is None or solution.value * total <= round(total * free)


@settings(deadline=None)
@given(
    total=st.integers(GIB, 200 * GIB),
    ratio=st.floats(0.01, 1.0),
    left=st.integers(0, 100 * GIB),
    more=st.integers(1, 100 * GIB),
)
def test_the_utilization_for_a_length_holds_one_request(total, ratio, left, more):
    facts = {
        "device_total_bytes": total,
        "gpu_memory_utilization_ratio": ratio,
        "kv_cache_available_bytes": left,
        "kv_cache_needed_bytes": left + more,
    }

    solution = utilization_for_max_len(incident(**facts))

    assert solution.value is None or (
        solution.value > ratio and (solution.value - ratio) * total >= more
    )


def test_a_device_of_zero_bytes_is_not_solved_for():
    facts = {
        "device_total_bytes": 0,
        "gpu_memory_utilization_ratio": 0.5,
        "kv_cache_available_bytes": -GIB,
    }

    assert utilization_for_kv_cache(incident(**facts)).value is None


# gpu_memory_utilization, down -----------------------------------------------------------------------------------


def test_the_utilization_falls_to_what_is_free():
    facts = {
        "device_free_bytes": round(7.57 * GIB),
        "device_total_bytes": round(23.6 * GIB),
        "desired_bytes": round(21.71 * GIB),
    }

    solution = utilization_within_free(incident(**facts))

    assert solution.value == 0.30
    assert solution.freed_bytes == round(
        facts["desired_bytes"] - 0.30 * facts["device_total_bytes"]
    )


def test_with_next_to_nothing_free_no_utilization_is_proposed():
    solution = utilization_within_free(incident(device_free_bytes=MIB, device_total_bytes=8 * GIB))

    assert solution.value is None
    assert "1.00 MiB of 8.00 GiB is free" in solution.reason


@settings(deadline=None)
@given(
    total=st.integers(GIB, 200 * GIB),
    share=st.floats(0, 1),
    total_slack=st.floats(0, 0.05 * GIB),
    free_slack=st.floats(0, 0.05 * GIB),
)
def test_lowered_utilization_fits_on_both_sides_of_rounding(total, share, total_slack, free_slack):
    free = round(total * share)
    facts = {
        "device_total_bytes": Fact("device_total_bytes", total, slack=total_slack),
        "device_free_bytes": Fact("device_free_bytes", free, slack=free_slack),
    }

    value = utilization_within_free(incident(**facts)).value

    assert value is None or (0 < value <= 1 and value * (total + total_slack) <= free - free_slack)


# Any facts ------------------------------------------------------------------------------------------------------

names = [
    "max_model_len_tokens",
    "estimated_max_model_len_tokens",
    "kv_cache_capacity_tokens",
    "kv_cache_needed_bytes",
    "kv_cache_available_bytes",
    "kv_cache_memory_bytes",
    "kv_cache_requested_bytes",
    "device_total_bytes",
    "device_free_bytes",
    "desired_bytes",
    "batch_size",
    "baseline_bytes",
    "other_process_in_use_bytes",
    "smallest_helpful_device_bytes",
]


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(SOLVERS)),
    facts=st.dictionaries(st.sampled_from(names), st.integers(1, 200 * GIB)),
    ratio=st.none() | st.floats(0.01, 1),
)
def test_any_facts_give_a_value_or_a_reason(name, facts, ratio):
    solution = SOLVERS[name](
        incident(**facts, **({} if ratio is None else {"gpu_memory_utilization_ratio": ratio}))
    )

    assert isinstance(solution, Solution)
    assert solution.reason
    assert solution.value is None or name == WITHOUT_FACTS or solution.value > 0


def test_length_shorter_than_one_image_is_not_applied():
    facts = {"max_model_len_tokens": 8192, "estimated_max_model_len_tokens": 1024}
    assert printed_estimate(incident(**facts)).blocked_by is None
    assert printed_estimate(incident(**facts, image_tokens=576)).blocked_by is None
    short = printed_estimate(incident(**facts, image_tokens=1225))
    assert short.value == 1024
    assert "one image takes 1225 tokens" in short.blocked_by


def test_a_byte_count_gives_way_by_what_failed_beside_it():
    facts = {"kv_cache_memory_bytes": 60 * GIB, "device_total_bytes": 80 * GIB}
    solved = kv_bytes_for_tried(incident(**facts, tried_bytes=3 * GIB, device_free_bytes=GIB))
    assert solved.value % MIB == 0
    assert 60 * GIB - 2 * GIB - others_margin_ratio() * 80 * GIB - MIB <= solved.value < 58 * GIB
    assert (
        kv_bytes_for_tried(incident(**facts, tried_bytes=90 * GIB, device_free_bytes=0)).value
        is None
    )


def test_after_sort_memory_counts_if_the_warm_up_fails():
    failed = incident(
        gpu_memory_utilization_ratio=0.95,
        device_total_bytes=2**31,
        tried_bytes=188 * MIB,
        device_free_bytes=148 * MIB,
    )
    alone = SOLVERS["utilization_for_tried"](failed).value
    in_sampler = SOLVERS["utilization_for_tried"](replace(failed, kind="sampler_warmup_oom")).value
    assert (alone - in_sampler) * 2048 == pytest.approx(94, abs=3)  # half of what was asked for
