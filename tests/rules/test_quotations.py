"""Quotations are told from reports: every example of rules/quotations.toml, through the whole of diagnose."""

from __future__ import annotations

import pytest

from oomguard.diagnosing import default_rules, diagnose
from oomguard.observe.scan import scan
from oomguard.observe.source import Line
from oomguard.rules.load import Quotation, RuleSet

RULES = default_rules()
QUOTATIONS = RULES.quotations
QUOTED = [pytest.param(q, text, id=f"{q.name}-{i}") for q in QUOTATIONS for i, text in enumerate(q.quoted)]
REAL = [pytest.param(text, id=f"{q.name}-{i}") for q in QUOTATIONS for i, text in enumerate(q.real)]


def kinds(text: str, *quotations: Quotation) -> list[str]:
    lines = (Line(number, 0, line) for number, line in enumerate(text.split("\n"), 1))
    return [found.kind for found in scan(lines, RuleSet(RULES.signatures, (), quotations)).incidents]


def test_there_are_quotations_and_each_has_a_name_of_its_own():
    names = [quotation.name for quotation in QUOTATIONS]

    assert len(names) > 10
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("quotation", "text"), QUOTED)
def test_a_quoted_example_is_a_message_and_its_own_entry_vetoes_it(quotation, text):
    assert kinds(text) != []
    assert kinds(text, quotation) == []


@pytest.mark.parametrize(("quotation", "text"), QUOTED)
def test_a_quoted_example_raises_no_alarm(quotation, text):
    assert diagnose(text).incidents == ()


@pytest.mark.parametrize("text", REAL)
def test_a_real_example_is_reported(text):
    assert diagnose(text).verdict == "oom"


@pytest.mark.parametrize("quotation", QUOTATIONS, ids=lambda quotation: quotation.name)
def test_an_entry_tells_a_quotation_from_a_report(quotation):
    assert quotation.quoted
    assert quotation.part in {"line", "before", "lead", "around", "raw"}


@pytest.mark.parametrize("quotation", QUOTATIONS, ids=lambda quotation: quotation.name)
def test_no_entry_vetoes_a_bare_report(quotation):
    reports = [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB",
        "(EngineCore_DP0 pid=7) ERROR 03-04 10:00:07 [core.py:708] ValueError: No available memory for the cache blocks.",
        "RuntimeError: CUDA error: out of memory",
    ]

    assert [kinds(text, quotation) for text in reports] == [kinds(text) for text in reports]
    assert all(kinds(text) for text in reports)


@pytest.mark.parametrize("quotation", QUOTATIONS, ids=lambda quotation: quotation.name)
def test_a_pattern_ends_in_time_on_a_long_line(quotation):
    for text in ("a" * 20_000, '"' * 20_000, "( " * 10_000, "x = ['" * 4_000, "if " * 7_000, "когда " * 4_000):
        quotation.pattern.search(text, timeout=0.5)
