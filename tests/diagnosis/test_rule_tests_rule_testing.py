"""What a rule's own test may say: facts, and what a failed call needed."""

from __future__ import annotations

import pytest

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB, MIB
from oomguard.diagnosis import assess, default_rules, incident_from, model_from
from oomguard.remedy.policy import Policy
from support.each import each

FACTS = {
    "batch_size": 16,
    "tried_bytes": 8 * MIB,
    "device_total_bytes": GIB,
    "baseline_bytes": 64 * MIB,
}


def test_a_test_without_a_call_has_no_model():
    assert model_from({"kind": "cuda_oom", "facts": FACTS}) is None


@each(("figure", "rows"), [("row_bytes", 9), ("seen_row_bytes", 2)])
def test_the_figures_of_a_call_give_the_rows_that_fit(figure, rows):
    test = {"kind": "cuda_oom", "facts": FACTS, "call": {figure: 100 * MIB}}

    found = assess(
        incident_from("cuda_oom", FACTS), default_rules(), Policy(), memory_model=model_from(test)
    )

    assert found.plan[0].new == rows


@each("call", [{"row_bytes": "x"}, {"row_bytes": 0}, {"row_bytes": True}, {"trace": 1}])
def test_a_figure_that_no_call_has_is_refused(call):
    with pytest.raises(SettingError, match="call: numbers must be above zero"):
        model_from({"kind": "cuda_oom", "facts": FACTS, "call": call})


def test_rows_that_are_no_number_are_refused():
    with pytest.raises(SettingError, match="call: numbers must be above zero"):
        model_from({"kind": "cuda_oom", "facts": {"batch_size": "many"}, "call": {"row_bytes": 1}})
