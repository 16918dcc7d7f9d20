"""Quotations are told from reports: every example of rules/quotations.toml, through the whole of diagnose."""

from __future__ import annotations

import time

import pytest

from oomguard.diagnosis import default_rules, diagnose, problems
from oomguard.rules.rule_files import RuleSet
from oomguard.rules.signature import Quotation
from oomguard.scan.scan import scan
from oomguard.scan.source import Line

RULES = default_rules()
QUOTATIONS = RULES.quotations
REPORT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def kinds(text: str, *quotations: Quotation) -> list[str]:
    lines = (Line(number, 0, line) for number, line in enumerate(text.split("\n"), 1))
    return [
        found.kind for found in scan(lines, RuleSet(RULES.signatures, (), quotations)).incidents
    ]


def test_there_are_quotations_and_each_has_a_name_of_its_own():
    names = [quotation.name for quotation in QUOTATIONS]

    assert len(names) > 10
    assert len(set(names)) == len(names)


def test_a_quoted_example_raises_no_alarm():
    alarms = [
        f"{q.name}: {text}" for q in QUOTATIONS for text in q.quoted if diagnose(text).incidents
    ]

    assert not alarms, "\n".join(alarms)


def test_a_real_example_is_reported():
    missed = [
        f"{q.name}: {text}"
        for q in QUOTATIONS
        for text in q.real
        if diagnose(text).verdict != "oom"
    ]

    assert not missed, "\n".join(missed)


def test_no_entry_vetoes_a_bare_report():
    reports = [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB",
        "(EngineCore_DP0 pid=7) ERROR 03-04 10:00:07 [core.py:708] ValueError: No available memory for the cache blocks.",
        "RuntimeError: CUDA error: out of memory",
    ]
    found = {text: kinds(text) for text in reports}

    assert all(found.values())
    assert [
        (q.name, text) for q in QUOTATIONS for text in reports if kinds(text, q) != found[text]
    ] == []


def test_a_pattern_ends_in_time_on_a_long_line():
    texts = (
        "a" * 20_000,
        '"' * 20_000,
        "( " * 10_000,
        "x = ['" * 4_000,
        "if " * 7_000,
        "когда " * 4_000,
    )
    slow = []
    for quotation in QUOTATIONS:
        for text in texts:
            try:
                quotation.pattern.search(text, timeout=0.5)
            except TimeoutError:
                slow.append(f"{quotation.name}: {text[:10]} …")

    assert not slow, "\n".join(slow)


def entry(**values: object) -> Quotation:
    return QUOTATIONS[0]._replace(**values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"quoted": (*QUOTATIONS[0].quoted, REPORT)}, "is reported anyway"),
        ({"quoted": ("nothing of the kind",)}, "no quoted text that would be reported without it"),
        ({"real": (QUOTATIONS[0].quoted[0],)}, "real[0] is not reported"),
    ],
)
def test_the_self_test_names_an_example_that_does_not_hold(values, problem):
    bad = entry(name="bad", **values)
    found = problems(RuleSet(RULES.signatures, (), (bad,)))
    found = [text for text in found if text.startswith("quotation")]

    assert len(found) == 1
    assert found[0].startswith("quotation 'bad': ")
    assert problem in found[0]


def test_the_self_test_finds_no_problem_in_the_shipped_entries():
    assert [text for text in problems(RULES) if text.startswith("quotation")] == []


@pytest.mark.parametrize(
    "text",
    [
        'If the server died with "CUDA error: out of memory", lower the share.',
        "# A worker that crashed may print:\n#   RuntimeError: CUDA error: out of memory",
    ],
)
def test_what_may_happen_to_anybody_is_none(text: str):
    assert diagnose(text).verdict == "no_oom"


def test_many_quoted_lines_are_no_slower_than_others():
    line = "Both 0.30 with `RuntimeError: CUDA error: out of memory`, 0.00 starts\n"
    diagnose(line)  # reads what is shipped

    began_s = time.thread_time()
    assert not diagnose(line * 170).incidents

    assert time.thread_time() - began_s < 1
