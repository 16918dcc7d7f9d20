"""Texts that quote memory errors raise no alarm, and real failures that resemble them are found.

The cases are data: negatives/*.toml and positives/*.toml, each with the reason for its verdict.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import lookalikes
from oomguard.core.incident import KINDS


@pytest.fixture(scope="module")
def figures() -> Any:
    return lookalikes.measure()


def test_at_most_one_look_alike_in_twenty_raises_an_alarm(figures):
    assert figures.false_alarm_ratio <= lookalikes.FALSE_ALARM_GOAL, "\n".join(figures.false_alarms)


def test_nineteen_of_twenty_real_failures_beside_them_are_found(figures):
    assert figures.recall_ratio >= lookalikes.RECALL_GOAL, "\n".join(figures.missed)


@pytest.mark.parametrize(("group", "least"), [("negatives", 150), ("positives", 60)])
def test_every_case_has_a_text_a_reason_and_a_unique_name(group, least):
    cases = lookalikes.cases(group)
    named = Counter((case["style"], case["id"]) for case in cases)

    assert len(cases) >= least
    assert max(named.values()) == 1
    assert len({case["log"] for case in cases}) == len(cases)
    for case in cases:
        assert case["why"]
        assert case["log"].strip()
        assert case.get("kind") in ({None} if group == "negatives" else set(KINDS))
