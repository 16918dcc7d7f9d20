"""The records that travel along the flow: frozen, closed lists, unknown never zero."""

from __future__ import annotations

import dataclasses

import pytest

from oomguard.core.facts import Fact
from oomguard.core.incident import (
    CAUSES,
    KINDS,
    NOT_OOM_KINDS,
    PHASES,
    Attempt,
    Diagnosis,
    Effect,
    Evidence,
    Incident,
    Patch,
)
from support.each import each

DEAD, OOM, SECOND = (
    Incident("engine_dead", "dead"),
    Incident("cuda_oom", "boom"),
    Incident("host_oom", "killed"),
)


@each("names", [KINDS, CAUSES, PHASES])
def test_the_closed_lists_hold_each_name_once(names):
    assert len(set(names)) == len(names)


def test_effects_rise():
    assert Effect.OUTPUT_PRESERVING < Effect.REDUCES_CAPACITY < Effect.CHANGES_OUTPUTS


@each("effect", list(Effect))
def test_an_effect_is_read_back_from_its_text(effect):
    assert Effect.parse(str(effect)) is effect
    assert "_" not in str(effect)


@each("text", ["", "OUTPUT_PRESERVING", "output_preserving", "none"])
def test_another_text_is_no_effect(text):
    with pytest.raises(KeyError):
        Effect.parse(text)


@each("kind", KINDS)
def test_every_kind_is_an_oom_except_the_listed_ones(kind):
    assert Incident(kind, "boom").is_oom == (
        kind not in {"memory_profiling_changed", "encoder_budget", "engine_dead"}
    )


def test_the_kinds_that_are_no_oom_are_kinds():
    assert set(KINDS) >= NOT_OOM_KINDS


@each(
    ("incidents", "verdict", "first"),
    [
        ((), "no_oom", None),
        ((DEAD,), "no_oom", DEAD),
        ((DEAD, OOM, SECOND), "oom", OOM),
        ((OOM, DEAD), "oom", OOM),
    ],
)
def test_a_verdict_and_the_incident_to_act_on(incidents, verdict, first):
    diagnosis = Diagnosis("a.log", incidents)

    assert diagnosis.verdict == verdict
    assert diagnosis.first_cause is first


@each(("value", "number"), [(5, 5), (0, 0), (0.5, 0.5), ("5", None), (True, None)])
def test_a_number_is_a_number_and_nothing_else(value, number):
    assert Incident("cuda_oom", "boom", facts={"x": Fact("x", value)}).number("x") == number


def test_an_unknown_number_is_not_zero():
    assert OOM.number("tried_bytes") is None


def test_slack_is_zero_where_nothing_is_known():
    assert OOM.slack("tried_bytes") == 0.0
    assert Incident("cuda_oom", "boom", facts={"x": Fact("x", 1, slack=2.5)}).slack("x") == 2.5


@each(
    ("new", "blocked_by", "applicable"),
    [
        (1, None, True),
        (0, None, True),
        (False, None, True),
        (None, None, False),
        (1, "pinned", False),
    ],
)
def test_patch_applies_if_it_has_a_value_and_no_block(new, blocked_by, applicable):
    assert (
        Patch("x", 2, new, Effect.OUTPUT_PRESERVING, "r", blocked_by=blocked_by).applicable
        is applicable
    )


@each(
    ("changes", "succeeded"),
    [
        ({}, True),
        ({"exit_status": 0}, True),
        ({"exit_status": 1}, False),
        ({"exit_status": -9}, False),
        ({"error": "OutOfMemoryError"}, False),
        ({"incident": OOM, "exit_status": 0}, False),
    ],
)
def test_an_attempt_succeeded_where_nothing_failed(changes, succeeded):
    assert Attempt(1, {}, **changes).succeeded is succeeded


def test_evidence_names_its_line():
    assert str(Evidence("boom", 3)) == "line 3: boom"
    assert str(Evidence("boom")) == "boom"


@each("record", [OOM, Diagnosis("a"), Evidence("x"), Attempt(1, {}), Fact("x", 1)])
def test_a_record_cannot_be_changed(record):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, dataclasses.fields(record)[0].name, "other")


def test_the_empty_mapping_of_an_incident_cannot_be_changed():
    with pytest.raises(TypeError):
        OOM.facts["x"] = Fact("x", 1)  # type: ignore[index]


def test_an_attempt_is_printed_in_one_line():
    failed = Attempt(1, {"batch_size": 64}, incident=Incident("cuda_oom", ""), seconds=2.96)
    assert str(failed) == "attempt 1, batch_size=64, failed: cuda_oom, 3.0 s"
    assert str(Attempt(2, {}, exit_status=3)) == "attempt 2, failed with exit status 3, 0.0 s"
    assert str(Attempt(3, {}, error="ValueError")) == "attempt 3, ValueError, 0.0 s"
    assert str(Attempt(4, {"batch_size": 8})) == "attempt 4, batch_size=8, succeeded, 0.0 s"
