"""Ranking causes: confidence from steps, the likeliest first, texts filled in with facts and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Evidence, Incident, Location
from oomguard.rules.rule_files import Confidence, Rule, RuleSet, confidence, explain, matches
from oomguard.rules.syntax import compile_expression


def condition(source: str):
    return compile_expression(source, path="rule.toml", key="when")


def step(base=None, add=0.0, when=None):
    return Confidence(base, add, condition(when) if when else None)


def rule(
    code="XX101",
    *,
    steps=(step(0.5),),
    when=("True",),
    kinds=("cuda_oom",),
    cause="lora",
    unknown=(),
    **texts,
):
    return Rule(
        path="rule.toml",
        code=code,
        cause=cause,
        title=f"title of {code}",
        since="0",
        status="stable",
        kinds=tuple(kinds),
        when=tuple(condition(source) for source in when),
        unknown=tuple(unknown),
        confidence=tuple(steps),
        summary=texts.get("summary", "s"),
        why=texts.get("why", "w"),
        confirm="c",
        fixes=(),
        references=(),
        tests=(),
    )


def incident(kind="cuda_oom", **facts):
    return Incident(
        kind,
        "boom",
        facts={
            name: fact if isinstance(fact, Fact) else Fact(name, fact)
            for name, fact in facts.items()
        },
    )


def known(**facts):
    return incident(**facts).facts


def test_the_base_is_the_confidence():
    assert confidence(rule(steps=[step(0.4)]), {}) == 0.4


def test_a_step_adds_where_its_condition_holds():
    steps = [step(0.4), step(add=0.2, when="tried_bytes > 1.0")]

    assert confidence(rule(steps=steps), known(tried_bytes=2)) == pytest.approx(0.6)
    assert confidence(rule(steps=steps), known(tried_bytes=0)) == 0.4


def test_a_step_whose_condition_is_unknown_does_not_count():
    assert confidence(rule(steps=[step(0.4), step(add=0.2, when="tried_bytes > 1.0")]), {}) == 0.4


def test_a_later_base_replaces_what_was_added():
    steps = [step(0.4), step(add=0.3), step(0.9, when="tried_bytes > 1.0")]

    assert confidence(rule(steps=steps), known(tried_bytes=2)) == 0.9


@pytest.mark.parametrize(("add", "expected"), [(5.0, 0.99), (-5.0, 0.0), (float("inf"), 0.99)])
def test_confidence_stays_between_0_and_1(add, expected):
    assert confidence(rule(steps=[step(0.5), step(add=add)]), {}) == expected


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), max_size=6), st.floats(-10, 10))
def test_confidence_is_between_0_and_1_for_any_steps(adds, base):
    assert 0.0 <= confidence(rule(steps=[step(base), *(step(add=add) for add in adds)]), {}) <= 0.99


def test_a_rule_of_another_kind_does_not_match():
    assert not matches(rule(kinds=["kv_cache_none_left"]), incident("cuda_oom"))


def test_a_rule_matches_where_all_conditions_hold():
    two = rule(when=["tried_bytes > 1.0", "device_free_bytes < 1.0"])

    assert matches(two, incident(tried_bytes=2, device_free_bytes=0))
    assert not matches(two, incident(tried_bytes=2, device_free_bytes=3))


def test_an_unknown_condition_is_no_match():
    assert not matches(rule(when=["tried_bytes > 1.0"]), incident())


def test_a_rule_for_the_unknown_does_not_match_what_is_known():
    shy = rule(unknown=["batch_size"])

    assert matches(shy, incident())
    assert not matches(shy, incident(batch_size=4))


def test_causes_come_likeliest_first():
    rules = RuleSet(
        (),
        (
            rule("XX101", steps=[step(0.2)]),
            rule("XX102", steps=[step(0.9)]),
            rule("XX103", steps=[step(0.5)]),
        ),
    )

    assert [cause.rule for cause in explain(incident(), rules).causes] == [
        "XX102",
        "XX103",
        "XX101",
    ]


def test_ties_keep_the_order_of_the_codes():
    rules = RuleSet((), (rule("XX101"), rule("XX102"), rule("XX103")))

    assert [cause.rule for cause in explain(incident(), rules).causes] == [
        "XX101",
        "XX102",
        "XX103",
    ]


def test_what_no_rule_explains_has_the_cause_unknown():
    (cause,) = explain(incident(), RuleSet((), ())).causes

    assert (cause.id, cause.rule, cause.confidence) == ("unknown", "", 0.0)
    assert cause.title
    assert cause.explanation


def test_an_explanation_is_filled_with_facts():
    rules = RuleSet(
        (), (rule(summary="{tried_bytes:GiB} asked.", why="{device_free_bytes:GiB} free."),)
    )

    assert explain(incident(tried_bytes=5 * GIB), rules).causes[0].explanation == "5.00 GiB asked."


@pytest.mark.parametrize(
    "text",
    [
        "{tried_bytes.__class__}",
        "{tried_bytes!r}",
        "{tried_bytes[0]}",
        "{tried_bytes:>999999}",
        "{}",
    ],
)
def test_a_placeholder_reaches_nothing_but_a_fact(text):
    rules = RuleSet((), (rule(summary=text, why="end"),))

    assert explain(incident(tried_bytes=1), rules).causes[0].explanation == f"{text} end"


def test_a_printed_zero_reads_as_less_than_its_last_digit():
    zero = Fact("kv_cache_available_bytes", 0, slack=0.005 * GIB)
    rules = RuleSet((), (rule(summary="{kv_cache_available_bytes:GiB}", why="left"),))

    assert (
        explain(incident(kv_cache_available_bytes=zero), rules).causes[0].explanation
        == "less than 0.005 GiB left"
    )


def test_a_coarsely_printed_size_reads_as_about():
    coarse = Fact("kv_cache_available_bytes", round(0.1 * GIB), slack=0.05 * GIB)
    rules = RuleSet((), (rule(summary="{kv_cache_available_bytes:GiB}", why="left"),))

    assert (
        explain(incident(kv_cache_available_bytes=coarse), rules).causes[0].explanation
        == "about 0.1 GiB left"
    )


def test_a_condition_is_no_evidence():
    (cause,) = explain(
        incident(tried_bytes=2 * GIB), RuleSet((), (rule(when=["tried_bytes > 1.0"]),))
    ).causes

    assert cause.evidence == ()


def test_message_line_and_used_fact_lines_are_evidence():
    seen = Incident(
        "cuda_oom",
        "boom",
        location=Location(3),
        evidence=(Evidence("boom", 3), Evidence("free", 1), Evidence("else", 2)),
        facts={
            "device_free_bytes": Fact("device_free_bytes", 1, line=1),
            "tried_bytes": Fact("tried_bytes", 1, line=2),
        },
    )

    (cause,) = explain(seen, RuleSet((), (rule(summary="{device_free_bytes}"),))).causes

    assert [evidence.line for evidence in cause.evidence] == [3, 1]


def test_the_incident_given_is_not_changed():
    before = incident(tried_bytes=2)

    explain(before, RuleSet((), (rule(),)))

    assert before.causes == ()
