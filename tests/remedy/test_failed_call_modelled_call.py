"""A failed call as its model: rows that fit by what a row needs, or few enough to be measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.facts import GIB, MIB, Fact
from oomguard.core.incident import Incident
from oomguard.core.settings import SETTINGS
from oomguard.diagnosis import assess, default_rules
from oomguard.estimate.constants import reserved_ratio
from oomguard.remedy.failed_call import VARIED, CallModel
from oomguard.remedy.policy import Policy

sizes = st.integers(0, 200 * GIB)


def incident(**facts) -> Incident:
    return Incident(
        "cuda_oom", "boom", facts={name: Fact(name, value) for name, value in facts.items()}
    )


def rows(call: CallModel, **facts):
    return call.solve("batch_size", incident(**facts))


# What a row needs is known -----------------------------------------------------------------------------------------


def test_rows_that_fit_beside_what_was_live():
    solution = rows(CallModel(16, 64 * MIB, row_bytes=20 * MIB), device_total_bytes=256 * MIB)

    assert solution.value == 9
    assert solution.freed_bytes == 7 * 20 * MIB
    assert solution.predicts == {"peak_bytes": (64 + 9 * 20) * MIB}


def test_other_processes_leave_less_room_for_rows():
    call = CallModel(16, 64 * MIB, row_bytes=20 * MIB)

    assert rows(call, device_total_bytes=256 * MIB, other_process_in_use_bytes=100 * MIB).value == 4


def test_a_caching_allocator_holds_more_than_the_tensors():
    plain, cached = CallModel(16, 0, row_bytes=MIB), CallModel(16, 0, row_bytes=MIB, is_cached=True)

    room = (
        plain.room_bytes(incident(device_total_bytes=GIB)),
        cached.room_bytes(incident(device_total_bytes=GIB)),
    )

    assert room[0] - room[1] == pytest.approx(reserved_ratio() * GIB)


def test_not_one_row_is_not_solved():
    solution = rows(CallModel(16, 64 * MIB, row_bytes=GIB), device_total_bytes=256 * MIB)

    assert solution.value is None
    assert "one row needs 1.00 GiB" in solution.reason


def test_one_row_is_tried_if_only_the_model_rejects_it():
    call = CallModel(16, 64 * MIB, row_bytes=GIB, seen_row_bytes=MIB)

    assert rows(call, device_total_bytes=256 * MIB).value == 1


def test_a_single_row_is_not_split():
    assert (
        rows(CallModel(1, 0, row_bytes=MIB, seen_row_bytes=MIB), device_total_bytes=GIB).value
        is None
    )


@settings(deadline=None)
@given(
    number=st.integers(1, 4096),
    row=st.integers(1, 10 * GIB),
    base=sizes,
    total=sizes,
    others=st.none() | sizes,
    seen=st.none() | st.integers(1, 200 * GIB),
)
def test_rows_are_fewer_than_failed_and_fit(number, row, base, total, others, seen):
    beside = {} if others is None else {"other_process_in_use_bytes": others}

    value = rows(CallModel(number, base, row, seen), device_total_bytes=total, **beside).value

    if value is not None:
        assert 1 <= value < number
        assert base + value * (row if value > 1 or seen is None else min(row, seen)) <= total - (
            others or 0
        )


def test_rows_name_the_one_figure_that_is_missing(subtests):
    for missing, words in [
        ("row_bytes", "how much memory one row takes"),
        ("baseline_bytes", "how much memory was in use before the call"),
        ("device_total_bytes", "how large the device is"),
    ]:
        with subtests.test(missing=missing):
            call = CallModel(
                8,
                None if missing == "baseline_bytes" else GIB,
                row_bytes=None if missing == "row_bytes" else GIB,
            )

            solution = rows(
                call, **({} if missing == "device_total_bytes" else {"device_total_bytes": 8 * GIB})
            )

            assert solution.value is None
            assert solution.reason == f"not known: {words}"


# Only what the rows held is known ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(number=st.integers(1, 4096), seen=st.integers(1, 10 * GIB), base=sizes, total=sizes)
def test_measured_rows_are_few_and_would_have_fitted(number, seen, base, total):
    solution = rows(CallModel(number, base, seen_row_bytes=seen), device_total_bytes=total)

    if solution.value is not None:
        assert 1 <= solution.value <= max(1, number // 4)
        assert base + solution.value * seen <= total
        assert "first, then as many as this measurement allows" in solution.reason


# Nothing is known that gives a number ------------------------------------------------------------------------------


def test_unsolved_rows_are_halved_or_cut_by_remaining_attempts(subtests):
    for number, left, value in [(64, 7, 32), (5000, 7, 1250), (64, 1, 1), (2, 7, 1)]:
        with subtests.test(number=number, left=left, value=value):
            assert rows(CallModel(number, None, attempts_left=left)).value == value


def test_one_row_and_the_last_attempt_are_not_halved(subtests):
    for number, left in [(1, 7), (64, 0)]:
        with subtests.test(number=number, left=left):
            assert rows(CallModel(number, None, attempts_left=left)).value is None


def test_rows_next_to_a_heavy_one_run_in_halves():
    heavy = {"base_bytes": 0, "seen_row_bytes": GIB, "attempts_left": 5}

    assert rows(CallModel(8, **heavy, others_ran=True), device_total_bytes=MIB).value == 4
    assert rows(CallModel(8, **heavy), device_total_bytes=MIB).value is None


# A trace -----------------------------------------------------------------------------------------------------------


# In the plan -------------------------------------------------------------------------------------------------------


def planned(call: CallModel, policy: Policy | None = None):
    failed = incident(batch_size=call.rows, tried_bytes=8 * MIB, device_total_bytes=256 * MIB)
    found = assess(failed, default_rules(), policy or Policy(), memory_model=call)
    return next(patch for patch in found.plan if patch.setting == "batch_size")


def test_planner_takes_rows_from_the_model_of_the_failure():
    patch = planned(CallModel(16, 64 * MIB, row_bytes=20 * MIB))

    assert (patch.new, patch.applicable, patch.rule) == (9, True, "OG301")


def test_a_call_that_cannot_be_split_is_solved_and_not_applied():
    patch = planned(CallModel(16, 64 * MIB, row_bytes=20 * MIB, not_splittable="it streams"))

    assert (patch.new, patch.blocked_by) == (9, "it streams")
    assert (
        str(patch.effect) == "changes-outputs"
    )  # nobody says that its rows in parts give the same


def test_without_a_model_the_plan_names_what_is_not_measured():
    found = assess(incident(batch_size=16, tried_bytes=8 * MIB), default_rules(), Policy())

    assert found.plan[0].reason == (
        "The log does not show how much memory one row takes, how much memory was in use before the call and how large the "
        "device is."
    )
    assert "The log does not show how much memory one row takes." in found.unknown


def test_every_remedy_of_a_call_is_a_setting():
    assert set(VARIED) <= set(SETTINGS)
    assert CallModel(16, 0).solve("max_model_len", incident()) is None


def test_where_nothing_is_free_before_any_row_the_plan_says_so():
    call = CallModel(16, 101 * MIB, seen_row_bytes=1)
    failure = incident(device_total_bytes=100 * MIB)
    assert "weights and inputs" in call.solve("batch_size", failure).reason
