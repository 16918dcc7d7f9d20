"""Who held how much of the device, from the figures of old and new messages; implausible ones are unknown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.estimate.budget import add_shares

DEVICE = {"device_total_bytes": 24 * GIB, "device_free_bytes": 1 * GIB, "tried_bytes": 2 * GIB}
TENSORS = {"allocated_bytes": 18 * GIB, "reserved_unallocated_bytes": 2 * GIB}


def shares(**printed: object) -> dict[str, object]:
    facts = {name: Fact(name, value, "printed") for name, value in printed.items()}
    add_shares(facts)
    assert all(facts[name].value == value for name, value in printed.items() if name in facts)
    return {name: fact.value for name, fact in facts.items() if name not in printed}


def test_a_new_message_tells_all_parts():
    assert shares(**DEVICE, **TENSORS, process_in_use_bytes=21 * GIB) == {
        "non_torch_bytes": 1 * GIB,
        "unused_bytes": 2 * GIB,
        "own_bytes": 21 * GIB,
        "tried_ratio": 2 / 24,
        "unused_ratio": 2 / 24,
        "own_ratio": 21 / 24,
        "others_bytes": 2 * GIB,
        "others_ratio": 2 / 24,
        "before_graphs": True,
    }


def test_old_message_with_total_reserved_gives_the_same_parts():
    old = shares(**DEVICE, allocated_bytes=18 * GIB, reserved_total_bytes=20 * GIB)

    assert old["unused_bytes"] == 2 * GIB
    assert old["own_bytes"] == 20 * GIB
    assert old["others_bytes"] == 3 * GIB


def test_implausible_container_figure_is_unknown_never_zero(subtests):
    for seen in [0, 17179869184 * GIB, 3 * GIB]:
        with subtests.test(seen=seen):
            told = shares(**DEVICE, **TENSORS, process_in_use_bytes=seen)

            assert "non_torch_bytes" not in told
            assert told["own_bytes"] == 20 * GIB


def test_listed_process_that_matches_the_tensors_is_ours():
    told = shares(**DEVICE, **TENSORS, other_process_in_use_bytes=21 * GIB)

    assert (told["own_bytes"], told["process_in_use_bytes"]) == (21 * GIB, 21 * GIB)
    assert told["others_bytes"] == 2 * GIB


def test_listed_process_that_contradicts_the_tensors_is_another(subtests):
    for seen in [GIB, 8 * GIB]:
        with subtests.test(seen=seen):
            assert (
                shares(**DEVICE, **TENSORS, other_process_in_use_bytes=seen)["own_bytes"]
                == 20 * GIB
            )


def test_reserved_below_allocated_is_only_rounding():
    told = shares(**DEVICE, allocated_bytes=20 * GIB, reserved_total_bytes=20 * GIB - 1)

    assert "unused_bytes" not in told


def test_without_the_total_there_are_no_ratios():
    told = shares(**TENSORS, tried_bytes=GIB, device_free_bytes=GIB)

    assert told == {"unused_bytes": 2 * GIB, "own_bytes": 20 * GIB, "before_graphs": True}
    assert shares(device_total_bytes=0, tried_bytes=GIB) == {}


def test_without_the_free_bytes_others_are_unknown():
    assert "others_bytes" not in shares(device_total_bytes=24 * GIB, **TENSORS)


def test_others_are_never_negative():
    assert shares(**{**DEVICE, "device_free_bytes": 6 * GIB}, **TENSORS)["others_bytes"] == 0


def test_nothing_printed_tells_nothing():
    assert shares() == {}
    assert shares(model="m", prefix_caching=True) == {}


def test_a_printed_share_is_not_overwritten():
    assert "non_torch_bytes" not in shares(
        **TENSORS, process_in_use_bytes=21 * GIB, non_torch_bytes=5
    )


sizes = st.integers(0, 1 << 60)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "device_total_bytes",
                "device_free_bytes",
                "tried_bytes",
                "allocated_bytes",
                "reserved_total_bytes",
                "reserved_unallocated_bytes",
                "process_in_use_bytes",
                "other_process_in_use_bytes",
            ]
        ),
        sizes,
    )
)
def test_no_figures_give_a_negative_share_or_an_error(printed):
    assert all(value >= 0 for value in shares(**printed).values())


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_own_others_and_free_add_up_to_the_device(tensors, unused, others, free):
    told = shares(
        device_total_bytes=tensors + unused + others + free + 1,
        device_free_bytes=free + 1,
        allocated_bytes=tensors,
        reserved_unallocated_bytes=unused,
    )

    assert (told["own_bytes"], told["others_bytes"]) == (tensors + unused, others)
