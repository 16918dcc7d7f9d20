"""The shipped table of model classes whose rows do not depend on each other, and the tool that writes it."""

import tomllib

import pytest

from support.independence_table import CALLS, TABLE, merged, verdicts_of, written

SHIPPED = tomllib.loads(TABLE.read_text(encoding="utf-8"))
NEWEST = SHIPPED["transformers"][-1]
INDEPENDENT = {
    "forward": (
        "BertModel",
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "T5ForConditionalGeneration",
        "ViTModel",
    ),
    "generate": (
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "T5ForConditionalGeneration",
        "WhisperForConditionalGeneration",
    ),
}


def found(verdict, why="", by="traced", layout=None):
    return {"verdict": verdict, "why": why, "by": by, "draws": False, "layout": layout or {}}


@pytest.mark.parametrize("call", CALLS)
def test_the_lists_are_sorted_and_name_each_class_once(call):
    part = SHIPPED[call]
    for names in (
        part["independent"],
        part["dependent"],
        part["by_version"],
        part["numeric"],
        part["draws"],
    ):
        assert list(names) == sorted(set(names))
    named = [*part["independent"], *part["dependent"], *part["by_version"]]
    assert len(named) == len(set(named))
    assert {*part["numeric"], *part["draws"], *part["layout"]} <= set(named)
    assert all(part["dependent"].values()), "a reason is missing"


@pytest.mark.parametrize("call", CALLS)
def test_classes_that_most_programs_use_are_known(call):
    known = verdicts_of(SHIPPED, call, NEWEST)
    assert [name for name in INDEPENDENT[call] if known.get(name) != ""] == []
    assert (
        known["NllbMoeForConditionalGeneration"]
        == "its experts share a fixed token capacity across the batch"
    )


def test_what_is_written_is_read_back_and_other_versions_stay():
    first = merged(
        {},
        "4.50.0",
        {"A": {"forward": found("independent")}, "B": {"forward": found("independent")}},
    )
    layout = {"states": {"axis": 1, "entries": 1}}
    newer = {
        "A": {
            "forward": found("independent", by="numeric", layout=layout),
            "generate": found("unknown"),
        },
        "B": {"forward": found("dependent", "its experts choose")},
        "C": {"forward": found("dependent", "it normalizes")},
    }
    table = tomllib.loads(written(merged(first, "5.0.0", newer)))
    assert table["transformers"] == ["4.50.0", "5.0.0"]
    assert table["forward"]["independent"] == table["forward"]["numeric"] == ["A"]
    assert table["forward"]["dependent"] == {"C": "it normalizes"}
    assert table["forward"]["by_version"] == {"B": {"4.50.0": "", "5.0.0": "its experts choose"}}
    assert table["forward"]["layout"] == {"A": layout}
    assert table["generate"]["independent"] == []


def test_the_tool_finds_what_is_shipped():
    pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from support.row_verdict import verdicts

    version = transformers.__version__
    for name in ("GPT2LMHeadModel", "NllbMoeForConditionalGeneration"):
        for call, verdict in verdicts(name).items():
            assert verdict["why"] == verdicts_of(SHIPPED, call, version)[name]
            assert verdict["by"] == "traced"
