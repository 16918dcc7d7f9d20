"""What a setting's value is now: the engine's word first, a script's own flag only where nothing printed speaks against it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import SettingInForce
from oomguard.scan.context import (
    SCRIPT,
    merged_settings,
    requested_share,
    with_requested_share,
    without_contradicted,
)

SHARE = "gpu_memory_utilization"
RATIO = "gpu_memory_utilization_ratio"
HALF_A_HUNDREDTH = round(0.005 * GIB)


def flag(value: object, name: str = SHARE, source: str = SCRIPT) -> SettingInForce:
    return SettingInForce(name, value, True, source)


def printed(
    desired_gib: float | None = None, total_gib: float | None = None, **others: Fact
) -> dict[str, Fact]:
    sizes = {"desired_bytes": desired_gib, "device_total_bytes": total_gib}
    facts = {
        name: Fact(name, round(gib * GIB), "printed", HALF_A_HUNDREDTH)
        for name, gib in sizes.items()
        if gib is not None
    }
    return {**facts, **others}


def test_requested_over_total_has_the_fewest_digits_allowed():
    share = requested_share(printed(0.64, 22.93))
    assert (share.name, share.value, share.source) == (RATIO, 0.028, "solved")


@settings(max_examples=200)
@given(st.integers(10, 999), st.floats(4.0, 2000.0))
def test_the_share_that_was_typed_lies_within_the_slack(thousandths, total_gib):
    typed = thousandths / 1000
    share = requested_share(printed(round(typed * total_gib, 2), round(total_gib, 2)))
    assert share is not None
    assert abs(share.value - typed) <= 2 * share.slack + 1e-9


@pytest.mark.parametrize(
    "facts", [printed(), printed(0.64), printed(None, 22.9), printed(0.0, 22.9), printed(0.6, 0.0)]
)
def test_without_both_figures_no_share_is_known(facts):
    assert requested_share(facts) is None
    assert with_requested_share(facts) == facts


def test_a_printed_share_is_not_replaced():
    facts = printed(0.64, 22.93, gpu_memory_utilization_ratio=Fact(RATIO, 0.5))
    assert with_requested_share(facts)[RATIO].value == 0.5


def test_script_flag_confirmed_by_requested_over_total_is_exact():
    kept, facts = without_contradicted({SHARE: flag(0.0281)}, printed(0.64, 22.93), complete=False)
    assert (kept[SHARE].value, facts[RATIO].value, facts[RATIO].source) == (0.0281, 0.0281, SCRIPT)


def test_script_flag_against_requested_over_total_was_ignored():
    kept, facts = without_contradicted({SHARE: flag(0.028)}, printed(6.88, 22.93), complete=False)
    assert kept == {}
    assert RATIO not in facts


def test_script_flag_against_a_printed_value_was_ignored():
    kept, _ = without_contradicted(
        {"max_model_len": flag(8192, "max_model_len")},
        {"max_model_len_tokens": Fact("max_model_len_tokens", 32768)},
        complete=False,
    )
    assert kept == {}


def test_a_data_type_is_the_same_with_torchs_name_before_it():
    kept, _ = without_contradicted(
        {"dtype": flag("float16", "dtype")},
        {"dtype": Fact("dtype", "torch.float16")},
        complete=False,
    )
    assert "dtype" in kept


def test_engine_and_caller_statements_beat_printed_text():
    stated = {SHARE: flag(0.5, source="printed")}
    assert without_contradicted(stated, printed(0.64, 22.93), complete=True)[0] == stated


def test_complete_engine_list_leaves_no_script_flag():
    settings_, complete = merged_settings({}, {SHARE: flag(0.5)}, echo_complete=True)
    assert (settings_, complete) == ({}, True)


def test_script_flags_are_evidence_but_not_a_complete_list():
    settings_, complete = merged_settings({}, {SHARE: flag(0.5)}, echo_complete=False)
    assert (settings_[SHARE].value, complete) == (0.5, False)


def test_engines_own_command_is_complete_and_beats_the_echo():
    settings_, complete = merged_settings(
        {SHARE: flag(0.4, source="printed")},
        {SHARE: flag(0.5, source="command")},
        echo_complete=False,
    )
    assert (settings_[SHARE].value, complete) == (0.5, True)
