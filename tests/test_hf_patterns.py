"""The tester's patterns of Hugging Face users are complete; ``python benchmarks/hf_patterns.py`` runs them."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter

import hf_patterns
from support.hf_pattern import DATA

FIRST = hf_patterns.first_outcomes()


def test_every_pattern_of_an_area_has_its_first_outcome() -> None:
    registered = {
        area: [
            node.name
            for node in ast.parse((DATA / f"patterns_{area}.py").read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
            and any(
                isinstance(by, ast.Call) and getattr(by.func, "id", "") == "pattern"
                for by in node.decorator_list
            )
        ]
        for area in FIRST
    }

    assert registered == {area: list(outcomes) for area, outcomes in FIRST.items()}
    assert Counter(outcome for names in FIRST.values() for outcome in names.values()) == {
        "equal": 25,
        "refused": 12,
        "original error": 55,
        "wrong": 5,
        "other error": 3,
        "dropped": 2,
    }


def test_every_limit_is_one_under_which_the_pattern_failed_alone() -> None:
    names = {found for area in FIRST.values() for found in area}
    bare = json.loads((DATA / "bare.json").read_text(encoding="utf-8"))

    assert bare.keys() <= names
    assert {record["outcome"] for record in bare.values()} == {"bare side good"}


def test_the_patterns_name_no_path_of_one_machine() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DATA.iterdir() if path.is_file()]

    assert not [
        line
        for text in texts
        for line in text.splitlines()
        if re.search(r"/(work|root|home|tmp)/", line)
    ]


def test_a_reason_is_what_stands_behind_its_mark_in_the_notes() -> None:
    record = {
        "notes": ["oomguard: first\n  change: batch_size [not automatic: one row]"],
        "error": "OOM",
    }

    assert hf_patterns.reason(record) == "not automatic: one row]"
    assert hf_patterns.reason({"error": "OOM"}) == "OOM"
