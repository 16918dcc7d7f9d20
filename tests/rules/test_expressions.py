"""Conditions over facts: what is missing is unknown, never false and never zero."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.errors import RuleError
from oomguard.facts import Fact
from oomguard.rules.expressions import Expression, compile_expression, suggestion


def expression(source: str, result: str | None = "BOOL"):
    return compile_expression(source, path="rule.toml", key="when[0]", result=result)


def facts(**values):
    return {name: Fact(name, value) for name, value in values.items()}


def test_a_condition_holds_over_known_facts():
    assert expression("tried_bytes > device_free_bytes").evaluate(facts(tried_bytes=2, device_free_bytes=1)) is True
    assert expression("tried_bytes > device_free_bytes").evaluate(facts(tried_bytes=1, device_free_bytes=2)) is False


def test_a_missing_fact_makes_the_condition_unknown():
    assert expression("tried_bytes > device_free_bytes").evaluate(facts(tried_bytes=2)) is None


def test_what_is_missing_does_not_matter_where_the_rest_decides():
    assert expression("tried_bytes > 1.0 || device_free_bytes > 1.0").evaluate(facts(tried_bytes=2)) is True
    assert expression("tried_bytes > 1.0 && device_free_bytes > 1.0").evaluate(facts(tried_bytes=0)) is False


def test_a_missing_yes_or_no_is_not_no():
    assert expression("prefix_caching == false").evaluate({}) is None


def test_missing_names_the_facts_that_nobody_knows():
    condition = expression("tried_bytes > 0.5 * device_total_bytes && model == 'x'")

    assert condition.missing(facts(tried_bytes=1)) == ("device_total_bytes", "model")


def test_missing_names_each_fact_once():
    assert expression("tried_bytes > 1.0 && tried_bytes < 9.0").missing({}) == ("tried_bytes",)


@pytest.mark.parametrize("source", ["model == 'device_total_bytes'", 'model == "device_total_bytes"'])
def test_a_fact_named_inside_a_text_is_not_missing(source):
    assert expression(source).missing(facts(model="x")) == ()


def test_a_fact_named_after_an_escaped_quote_is_not_missing():
    assert expression(r'model == "a\" device_total_bytes"').missing(facts(model="x")) == ()


def test_an_integer_division_by_zero_is_unknown():
    assert expression("1 / 0 > 0").evaluate({}) is None


def test_a_division_by_a_fact_of_zero_is_unknown():
    assert (
        expression("tried_bytes / device_total_bytes > 0.5").evaluate(facts(tried_bytes=1, device_total_bytes=0))
        is None
    )


def test_a_fact_of_the_wrong_type_is_unknown():
    assert expression("tried_bytes > 1.0").evaluate(facts(tried_bytes="many")) is None


def test_a_value_may_be_a_number_a_text_or_a_yes():
    assert expression("tried_bytes * 2.0", None).evaluate(facts(tried_bytes=4)) == 8.0
    assert expression("'sdpa'", None).evaluate({}) == "sdpa"
    assert expression("true", None).evaluate({}) is True


@pytest.mark.parametrize("source", ["", "  ", None, 3, ["true"]])
def test_what_is_no_text_is_refused(source):
    with pytest.raises(RuleError, match=r"rule\.toml, when\[0\]: expected a CEL expression"):
        compile_expression(source, path="rule.toml", key="when[0]")


def test_an_over_long_expression_is_refused():
    with pytest.raises(RuleError, match="longer than"):
        expression("true || " * 400 + "true")


@pytest.mark.parametrize(
    "source", ["tried_bytes >", "tried_bytes ? 1", "import os", "__import__('os')", "f(x", "1.0 +"]
)
def test_what_is_no_expression_is_refused_with_a_column(source):
    with pytest.raises(RuleError) as caught:
        expression(source)

    assert caught.value.column is not None


def test_an_attribute_of_a_fact_cannot_be_reached():
    with pytest.raises(RuleError):
        expression("tried_bytes.__class__ == 'int'")


def test_a_suggestion_is_made_only_for_what_is_near():
    assert suggestion("tried_byte", ("tried_bytes", "model")) == "did you mean 'tried_bytes'?"
    assert suggestion("zzz", ("tried_bytes", "model")) is None


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_a_comparison_is_that_of_python(left, right):
    known = facts(tried_bytes=left, device_free_bytes=right)

    assert expression("tried_bytes > device_free_bytes").evaluate(known) is (left > right)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_compiles_or_is_refused(source):
    try:
        compiled = expression(source)
    except RuleError:
        return
    assert compiled.evaluate({}) in {True, False, None}


@pytest.mark.parametrize(
    ("source", "name", "column"),
    [
        ("[1, 2].all(a, a > 0)", "all", 8),
        ("true && [1].exists (a, true)", "exists", 13),
        ("[1].exists_one(a, true)", "exists_one", 5),
        ("[1].map(a, a) == [1]", "map", 5),
        ("[1].filter // x\n(a, true) == []", "filter", 5),
    ],
)
def test_a_macro_over_a_list_is_refused_by_its_name_and_column(source, name, column):
    with pytest.raises(RuleError, match=rf"rule\.toml, column {column}, when\[0\]: {name}\(\) is not known"):
        expression(source)


@pytest.mark.parametrize("source", ["model == 'x.all(y)'", 'model == "a\\" map("', "model in ['all (', 'b']"])
def test_a_macro_named_inside_a_text_is_none(source):
    assert expression(source).evaluate(facts(model="x.all(y)")) in {True, False}


def test_work_without_end_is_unknown_and_no_error():
    digits = str(list(range(60)))
    nest = "true"
    for name in "abcdef":
        nest = f"{digits}.all({name}, {nest})"

    assert Expression(nest).evaluate({}) is None


def test_a_mistake_in_a_long_expression_is_shown_with_what_stands_around_it():
    with pytest.raises(RuleError) as caught:
        expression("tried_bytes > 1.0 && " * 90 + "nope > 1.0")

    assert caught.value.column == 21 * 90 + 1
    assert len(str(caught.value)) < 500
    assert str(caught.value).splitlines()[-1].index("^") == str(caught.value).splitlines()[-2].index("nope")
