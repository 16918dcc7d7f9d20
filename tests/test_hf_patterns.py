"""The patterns of Hugging Face users are the tester's, each with the outcome of the first run."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter

import pytest

import hf_patterns
from support.hf_pattern import DATA

SETS = {name: hf_patterns.first_outcomes(name) for name in hf_patterns.SETS}
FIGURES = {
    "hf_patterns": {"equal": 25, "refused": 12, "original error": 55, "wrong": 5, "other error": 3, "dropped": 2},
    "hf_second": {"equal": 37, "refused": 7},
}


@pytest.mark.parametrize(("name", "area"), [(name, area) for name, areas in SETS.items() for area in areas])
def test_every_pattern_of_an_area_has_its_first_outcome(name: str, area: str) -> None:
    module = ast.parse((DATA / name / f"patterns_{area}.py").read_text(encoding="utf-8"))
    held = DATA / name / "reserve.txt"
    left_out = set(held.read_text(encoding="utf-8").split()) if held.is_file() else set()
    registered = [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(by, ast.Call) and getattr(by.func, "id", "") == "pattern" for by in node.decorator_list)
    ]

    assert [found for found in registered if found not in left_out] == list(SETS[name][area])


@pytest.mark.parametrize("name", SETS)
def test_the_first_figure_stands(name: str) -> None:
    assert Counter(outcome for names in SETS[name].values() for outcome in names.values()) == FIGURES[name]


@pytest.mark.parametrize("name", SETS)
def test_every_limit_is_one_under_which_the_pattern_failed_alone(name: str) -> None:
    names = {found for area in SETS[name].values() for found in area}
    bare = json.loads((DATA / name / "bare.json").read_text(encoding="utf-8"))
    held = DATA / name / "reserve.txt"

    assert bare.keys() <= names | set(held.read_text(encoding="utf-8").split() if held.is_file() else ())
    assert {record["outcome"] for record in bare.values()} == {"bare side good"}


@pytest.mark.parametrize("name", SETS)
def test_no_path_of_one_machine_stands_in_the_patterns(name: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (DATA / name).iterdir() if path.is_file()]

    assert not [line for text in texts for line in text.splitlines() if re.search(r"/(work|root|home|tmp)/", line)]


def test_a_reason_is_what_stands_behind_its_mark_in_the_notes() -> None:
    record = {"notes": ["oomguard: first\n  change: batch_size [not done by itself: one row]"], "error": "OOM"}

    assert hf_patterns.reason(record) == "not done by itself: one row]"
    assert hf_patterns.reason({"error": "OOM"}) == "OOM"
