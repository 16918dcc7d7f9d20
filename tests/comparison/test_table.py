"""The rows of a comparison: what counts as changed, what is left open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.comparison import ComparedValue, Row, setting_of
from oomguard.core.facts import GIB


def rows(comparison) -> dict[str, Row]:
    return {row.name: row for row in comparison.rows}


def test_a_default_that_moved_with_the_version_is_told_as_such(compared, vllm):
    old = vllm(version="0.19.1", fails=True)
    row = rows(compared(old, vllm(version="0.20.0", fails=True)))["gpu_memory_utilization"]
    assert (row.kind, row.old, row.new) == (
        "default",
        ComparedValue(0.9, "default"),
        ComparedValue(0.92, "default"),
    )
    assert row.difference == 0.02


def test_a_setting_of_the_users_is_told_as_set(compared, vllm):
    new = vllm(more=", 'gpu_memory_utilization': 0.8", share=0.8)
    row = rows(compared(vllm(), new))["gpu_memory_utilization"]
    assert (row.kind, row.new.origin) == ("setting", "set")


def test_new_or_gone_setting_differs_from_an_unchanged_one(compared, vllm):
    row = rows(compared(vllm(), vllm(more=", 'max_num_seqs': 64")))["max_num_seqs"]
    assert row.changed
    assert row.old.origin == "left alone"
    assert row.new.value == 64


def test_incomplete_settings_leave_nothing_called_untouched(compared, vllm):
    row = rows(compared(vllm(echo=False), vllm(more=", 'max_num_seqs': 64")))["max_num_seqs"]
    assert not row.known
    assert not row.changed


def test_data_type_is_equal_with_and_without_the_torch_prefix(compared, vllm):
    row = rows(compared(vllm(), vllm(more=", 'dtype': 'bfloat16'")))["dtype"]
    assert not row.changed


def test_dtype_auto_is_no_data_type_to_compare_with(side, vllm):
    assert setting_of(side(vllm(more=", 'dtype': 'auto'")), "dtype").value == "auto"
    assert setting_of(side(vllm()), "dtype").value == "bfloat16"


def test_each_part_of_the_budget_is_a_row(compared, vllm):
    parts = rows(compared(vllm(), vllm(weights="16.50", pool="3.25")))
    assert parts["weights"].difference == 1.5 * GIB
    assert parts["KV cache"].difference == -1.5 * GIB
    assert not parts["activations"].changed
    assert parts["in use at the start"].old.value == pytest.approx(0.39 * GIB, rel=1e-6)
    assert parts["device total"].unit == "bytes"


def test_a_part_that_one_log_leaves_out_is_no_change(compared, vllm):
    row = rows(compared(vllm(), vllm(fails=True)))["activations"]
    assert not row.known
    assert not row.changed


@given(
    printed=st.floats(0.1, 100).map(lambda size: round(size * GIB)),
    slack=st.floats(0, GIB / 10),
    share=st.floats(-1, 1),
)
def test_difference_within_rounding_is_no_change(printed, slack, share):
    row = Row(
        "weights",
        "budget",
        ComparedValue(printed, slack=slack),
        ComparedValue(printed + int(share * slack), slack=slack),
        "bytes",
    )
    assert not row.changed


@given(old=st.integers(0, 10**12), new=st.integers(0, 10**12), slack=st.integers(0, 10**9))
def test_what_changed_one_way_changed_the_other_way_too(old, new, slack):
    there = Row(
        "weights",
        "budget",
        ComparedValue(old, slack=slack),
        ComparedValue(new, slack=slack),
        "bytes",
    )
    back = Row(
        "weights",
        "budget",
        ComparedValue(new, slack=slack),
        ComparedValue(old, slack=slack),
        "bytes",
    )
    assert there.changed == back.changed
    assert there.difference == -back.difference


def test_unprinted_default_does_not_join_a_printed_value(compared, vllm):
    warm = "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering `max_num_seqs`"
    row = rows(compared(vllm(), vllm() + warm))["max_num_seqs"]
    assert row.new.value == 256
    assert not row.known


def test_what_sglang_prints_as_free_is_the_free_part(compared, sglang):
    row = rows(compared(sglang(), sglang()))["free"]
    assert row.new.value == round(1.88 * GIB)
