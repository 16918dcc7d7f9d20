"""A share that counts weights and pool together: raised above what the weights take, lowered for what did not fit beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident
from oomguard.remedy.from_log import static_share_for_pool, static_share_for_tried


def incident(**facts) -> Incident:
    return Incident(
        "kv_cache_none_left",
        "boom",
        facts={name: Fact(name, value) for name, value in facts.items()},
    )


def test_share_leaves_what_the_engine_needs_for_its_step():
    found = static_share_for_pool(
        incident(
            initial_free_bytes=24 * GIB,
            static_share_least_ratio=0.6,
            max_num_batched_tokens=4096,
            mem_fraction_static_ratio=0.55,
        )
    )

    kept_gib = 0.5 + 4096 * 1.5 / 1024 + 24 * 2 / 1024 + 1 / 8
    assert found.value == pytest.approx(1 - kept_gib / 24, abs=0.001)


def test_a_large_device_keeps_ten_gib_at_least():
    small = {"max_num_batched_tokens": 2048, "cuda_graph_max_bs": 8}
    found = static_share_for_pool(
        incident(initial_free_bytes=80 * GIB, static_share_least_ratio=0.5, **small)
    )

    assert found.value == pytest.approx(1 - 10 / 80, abs=0.001)


def test_weights_that_take_more_leave_activations_less():
    found = static_share_for_pool(
        incident(initial_free_bytes=80 * GIB, static_share_least_ratio=0.9)
    )

    assert found.value == pytest.approx(0.92, abs=0.001)


def test_weights_that_fill_the_device_have_no_share():
    found = static_share_for_pool(
        incident(initial_free_bytes=80 * GIB, static_share_least_ratio=0.96)
    )

    assert found.value is None
    assert "0.960" in found.reason


def test_a_share_that_is_high_enough_is_not_lowered():
    facts = {
        "initial_free_bytes": 80 * GIB,
        "static_share_least_ratio": 0.5,
        "mem_fraction_static_ratio": 0.9,
    }

    assert static_share_for_pool(incident(**facts)).value is None


def test_low_share_without_figures_is_raised_to_the_default():
    found = static_share_for_pool(incident(mem_fraction_static_ratio=0.5, tensor_parallel_size=4))

    assert found.value == 0.85
    assert found.unknown == ("what is free before and after loading the weights: not printed",)


def test_share_near_the_default_is_not_raised_without_figures():
    assert static_share_for_pool(incident(mem_fraction_static_ratio=0.85)).value is None


def test_default_share_does_not_fit_heavier_named_weights():
    facts = {
        "mem_fraction_static_ratio": 0.5,
        "device_total_bytes": 24 * GIB,
        "estimated_weights_bytes": 23 * GIB,
    }

    assert static_share_for_pool(incident(**facts)).value is None


def test_high_share_without_figures_falls_to_the_default():
    found = static_share_for_tried(incident(mem_fraction_static_ratio=0.95, tensor_parallel_size=4))

    assert found.value == 0.85
    assert "device total: not printed" in found.unknown


def test_generous_share_is_not_lowered_without_figures():
    assert static_share_for_tried(incident(mem_fraction_static_ratio=0.6)).value is None


def test_large_device_reserve_grows_with_graphs_ranks_draft(subtests):
    for more, kept_gib in [
        ({}, 13.125),
        ({"speculative": True}, 17.125),
        ({"tensor_parallel_size": 8}, 14.5),
    ]:
        with subtests.test(more=more, kept_gib=kept_gib):
            found = static_share_for_pool(
                incident(initial_free_bytes=80 * GIB, static_share_least_ratio=0.5, **more)
            )

            assert found.value == pytest.approx(1 - kept_gib / 80, abs=0.001)


def test_a_share_that_no_command_gives_is_the_engine_s_own():
    figures = {"device_total_bytes": 24 * GIB, "tried_bytes": 3 * GIB, "device_free_bytes": GIB}

    found = static_share_for_tried(incident(launch_shown=True, **figures))

    assert 0.7 < found.value < 0.77
    assert "no share is set" in found.reason
    assert static_share_for_tried(incident(**figures)).value is None


def test_what_the_start_prints_of_the_pool_tells_the_share():
    start = {
        "initial_free_bytes": 80 * GIB,
        "loaded_free_bytes": 60 * GIB,
        "kv_cache_available_bytes": 52 * GIB,
    }
    figures = {"device_total_bytes": 80 * GIB, "tried_bytes": 3 * GIB, "device_free_bytes": GIB}

    found = static_share_for_tried(incident(**start, **figures))

    assert found.value == pytest.approx(0.9 - 2 / 80 - 0.02, abs=0.002)
    assert static_share_for_tried(incident(**start, **figures, max_total_tokens=8192)).value is None


def test_remaining_graphs_need_no_more_each_than_earlier_ones():
    facts = {
        "mem_fraction_static_ratio": 0.9,
        "initial_free_bytes": 80 * GIB,
        "graphs_free_bytes": 4 * GIB,
    }
    counted = Incident(
        "cudagraph_capture_oom",
        "boom",
        phase="cudagraph_capture",
        facts={
            k: Fact(k, v) for k, v in {**facts, "graphs_captured": 10, "graphs_wanted": 15}.items()
        },
    )

    found = static_share_for_tried(counted)

    assert found.value == pytest.approx(0.9 - 2 / 80 - 0.02, abs=0.005)
    assert (0.9 - found.value) * 80 >= 2


def test_without_the_figures_of_loading_their_names_are_told():
    assert static_share_for_pool(incident()).unknown == (
        "what is free before and after loading the weights: not printed",
    )


@given(
    before=st.integers(8 * GIB, 200 * GIB),
    least=st.floats(0.01, 0.99),
    now=st.floats(0.05, 0.97),
    tokens=st.sampled_from([2048, 4096, 8192, 16384]),
)
def test_raised_share_exceeds_the_old_one_and_the_weights(before, least, now, tokens):
    found = static_share_for_pool(
        incident(
            initial_free_bytes=before,
            static_share_least_ratio=least,
            mem_fraction_static_ratio=now,
            max_num_batched_tokens=tokens,
        )
    )

    assert found.value is None or (found.value > now and found.value > least and found.value < 1)


@given(
    total=st.integers(8 * GIB, 200 * GIB),
    tried=st.integers(1, 8 * GIB),
    free=st.integers(0, 4 * GIB),
    share=st.floats(0.2, 0.98),
    least=st.floats(0.0, 0.9),
)
def test_lowered_share_makes_room_and_leaves_a_pool(total, tried, free, share, least):
    found = static_share_for_tried(
        incident(
            device_total_bytes=total,
            tried_bytes=tried,
            device_free_bytes=free,
            mem_fraction_static_ratio=share,
            static_share_least_ratio=least,
        )
    )

    assert found.value is None or (least < found.value < share)
    assert found.value is None or (share - found.value) * total >= max(0, tried - free)


def test_pool_above_half_the_share_could_not_give_it_back():
    figures = {
        "device_total_bytes": 80 * GIB,
        "device_free_bytes": 20 * GIB,
        "tried_bytes": 80 * GIB,
    }
    found = static_share_for_tried(incident(mem_fraction_static_ratio=0.9, **figures))
    assert found.value is None
    assert "80.00 GiB next to weights and pool does not fit in 80.00 GiB" in found.reason


def test_data_parallel_attention_keeps_room_for_each_rank():
    facts = {
        "initial_free_bytes": 140 * GIB,
        "static_share_least_ratio": 0.5,
        "cuda_graph_max_bs": 512,
    }
    one, all_ranks = (
        static_share_for_pool(
            incident(**facts, data_parallel_size=8, parallel_attention=parallel)
        ).value
        for parallel in (False, True)
    )

    assert one - all_ranks == pytest.approx(512 * 8 * 4.5 / 1024 / 140, abs=0.002)
