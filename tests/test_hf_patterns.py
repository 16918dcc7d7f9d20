"""The patterns of Hugging Face users are the tester's, each with the outcome of the first run."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

import hf_patterns
from support.hf_pattern import PATTERNS

AREAS = hf_patterns.first_outcomes()


@pytest.mark.parametrize("area", AREAS)
def test_every_pattern_of_an_area_has_its_first_outcome(area: str) -> None:
    module = ast.parse((PATTERNS / f"patterns_{area}.py").read_text(encoding="utf-8"))
    registered = [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(by, ast.Call) and getattr(by.func, "id", "") == "pattern" for by in node.decorator_list)
    ]

    assert registered == list(AREAS[area])


def test_the_first_figure_stands() -> None:
    outcomes = Counter(outcome for names in AREAS.values() for outcome in names.values())

    assert outcomes == {"equal": 25, "refused": 12, "original error": 55, "wrong": 5, "other error": 3, "dropped": 2}


def test_every_limit_is_one_under_which_the_pattern_failed_alone() -> None:
    names = {name for area in AREAS.values() for name in area}
    bare = json.loads((PATTERNS / "bare.json").read_text(encoding="utf-8"))

    assert bare.keys() <= names
    assert {record["outcome"] for record in bare.values()} == {"bare side good"}


def test_no_path_of_one_machine_stands_in_the_patterns() -> None:
    texts = [path.read_text(encoding="utf-8") for path in Path(PATTERNS).iterdir() if path.is_file()]

    assert not [line for text in texts for line in text.splitlines() if re.search(r"/(work|root|home|tmp)/", line)]


def test_a_reason_is_what_stands_behind_its_mark_in_the_notes() -> None:
    record = {"notes": ["oomguard: first\n  change: batch_size [not done by itself: one row]"], "error": "OOM"}

    assert hf_patterns.reason(record) == "not done by itself: one row]"
    assert hf_patterns.reason({"error": "OOM"}) == "OOM"
