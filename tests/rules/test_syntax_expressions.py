"""Conditions over facts: what is missing is unknown, never false and never zero."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import RuleError
from oomguard.core.facts import Fact
from oomguard.rules.syntax import Expression, compile_expression, suggestion


def expression(source: str, result: str | None = "bool") -> Expression:
    return compile_expression(source, path="rule.toml", key="when[0]", result=result)


def facts(**values):
    return {name: Fact(name, value) for name, value in values.items()}


def value(source: str, **known):
    return expression(source, None).evaluate(facts(**known))


def mistake(source: object, result: str | None = None) -> RuleError:
    with pytest.raises(RuleError) as caught:
        compile_expression(source, path="rule.toml", key="when[0]", result=result)
    return caught.value


def test_known_facts_decide_a_comparison():
    for source, expected in {
        "tried_bytes > device_free_bytes": True,
        "tried_bytes < device_free_bytes": False,
        "tried_bytes >= 2": True,
        "tried_bytes >= 2.0": True,
        "tried_bytes <= 1.5": False,
        "tried_bytes == 2.0": True,
        "tried_bytes != 2": False,
        "1 < tried_bytes <= 2": True,
        "2 < tried_bytes <= 9": False,
        "framework == 'vllm'": True,
        "framework != 'vllm'": False,
        "framework in ['vllm', 'sglang']": True,
        "framework not in ('vllm', 'sglang')": False,
        "tried_bytes in [1, 3]": False,
        "prefix_caching": True,
        "prefix_caching == False": False,
        "not prefix_caching": False,
        "True": True,
        "framework == 'vllm' and (tried_bytes < 1 or prefix_caching)": True,
        "framework == 'sglang' or tried_bytes < 1 and prefix_caching": False,
    }.items():
        known = {
            "tried_bytes": 2,
            "device_free_bytes": 1.5,
            "framework": "vllm",
            "prefix_caching": True,
        }
        assert value(source, **known) is expected, source


def test_a_value_is_a_float_a_text_or_a_bool():
    for source, expected in {
        "tried_bytes * 2": 8.0,
        "tried_bytes / 8 - -1.5": 2.0,
        "1 + 2 * 3": 7.0,
        "(1 + 2) * 3": 9.0,
        "tried_bytes if prefix_caching else 1": 4.0,
        "'a' if not prefix_caching else 'b'": "b",
        "'sdpa'": "sdpa",
        '"expandable_segments:True"': "expandable_segments:True",
        "False": False,
        " \n 8": 8.0,
    }.items():
        found = value(source, tried_bytes=4, prefix_caching=True)
        assert (type(found), found) == (type(expected), expected), source


def test_what_reads_a_missing_fact_is_unknown():
    for source in [
        "tried_bytes > 1",
        "1 > tried_bytes",
        "prefix_caching",
        "not prefix_caching",
        "prefix_caching == False",
        "framework in ['vllm']",
        "framework not in ['vllm']",
        "tried_bytes * 0 == 0",
        "-tried_bytes < 0",
        "True if prefix_caching else True",
        "0 < tried_bytes < 9",
    ]:
        assert value(source) is None, source


def test_and_or_and_not_follow_the_logic_of_three_values():
    """The facts are true, false or missing; Kleene's tables say what follows."""
    states = (True, False, None)
    for left, right in itertools.product(states, states):
        known = {"prefix_caching": left, "multimodal": right}
        known = {name: state for name, state in known.items() if state is not None}
        both = False if False in (left, right) else None if None in (left, right) else True
        either = True if True in (left, right) else None if None in (left, right) else False
        assert value("prefix_caching and multimodal", **known) is both, (left, right)
        assert value("prefix_caching or multimodal", **known) is either, (left, right)
        assert value("not prefix_caching", **known) is (None if left is None else not left)


def test_a_division_by_zero_and_what_is_not_finite_are_unknown():
    for source in [
        "1 / 0",
        "1.0 / 0.0 > 0",
        "tried_bytes / device_total_bytes > 0.5",
        "tried_bytes / (device_total_bytes * 2)",
        "1e308 * 10",
        "1e308 + 1e308 > 0",
        "1e308 * 10 - 1e308 * 10",
    ]:
        assert value(source, tried_bytes=1, device_total_bytes=0) is None, source
    assert value("1 / 0 > 1 or True") is True


def test_a_fact_that_is_no_finite_value_of_its_type_is_unknown():
    for wrong in ("many", True, float("nan"), float("inf"), 10**400):
        assert value("tried_bytes > 1", tried_bytes=wrong) is None, wrong
    assert value("model == 'x'", model=3) is None
    assert value("not prefix_caching", prefix_caching=0) is None


def test_missing_names_the_unknown_facts_once_and_in_order():
    condition = expression(
        "tried_bytes > 0.5 * device_total_bytes and (model == 'x' or device_total_bytes > 1)"
    )

    assert condition.missing({}) == ("tried_bytes", "device_total_bytes", "model")
    assert condition.missing(facts(tried_bytes=1)) == ("device_total_bytes", "model")


def test_a_fact_named_inside_a_text_is_not_missing():
    for source in ["model == 'device_total_bytes'", 'model == "it\'s device_total_bytes"']:
        assert expression(source).missing(facts(model="x")) == (), source


def test_what_is_no_text_is_refused():
    for source in ["", "  ", None, 3, ["True"]]:
        assert str(mistake(source)) == "rule.toml, when[0]: expected an expression in quotes"


def test_a_result_of_another_type_is_refused():
    for source, result in {"tried_bytes": "bool", "'a'": "number", "True": "text"}.items():
        assert f"expected a {result} expression" in str(mistake(source, result))


def test_the_spelling_of_older_rule_files_is_answered_by_pythons():
    for source, column, hint in [
        ("tried_bytes > 1 && model == 'x'", 17, "write and"),
        ("tried_bytes > 1 || model == 'x'", 17, "write or"),
        ("!prefix_caching", 1, "write not"),
        ("prefix_caching == true", 19, "write True"),
        ("false", 1, "write False"),
        ("prefix_caching ? 1 : 2", 16, "write x if condition else y"),
        ("tried_bytes = 1", 13, "write =="),
        (r"model == 'a\'b'", 10, None),
    ]:
        error = mistake(source)
        assert error.column == column, source
        assert hint is None or error.hint == hint, source


def test_every_mistake_is_shown_with_a_caret_under_it():
    for source, at, said in [
        ("tried_byte > 1", "tried_byte", "unknown fact 'tried_byte'"),
        ("  1 < tried_byte", "tried_byte", "unknown fact 'tried_byte'"),
        ("model == 'é' and tried_byte > 1", "tried_byte", "unknown fact 'tried_byte'"),
        ("model in [tried_byte]", "tried_byte", "unknown fact 'tried_byte'"),
        ("tried_bytes > 'a'", "'a'", "expected a number, but this is a text"),
        ("model == 1", "1", "expected a text, but this is a number"),
        ("model > 'a'", "model", "compare a text with == or != only"),
        ("prefix_caching < True", "prefix_caching", "compare a bool with == or != only"),
        ("tried_bytes and True", "tried_bytes", "expected a bool, but this is a number"),
        ("True and not tried_bytes", "tried_bytes", "expected a bool, but this is a number"),
        ("1 + True", "True", "expected a number, but this is a bool"),
        ("'a' + 'b'", "'a'", "expected a number, but this is a text"),
        ("-'a'", "'a'", "expected a number, but this is a text"),
        ("1 if tried_bytes else 2", "tried_bytes", "expected a bool, but this is a number"),
        ("1 if prefix_caching else 'b'", "'b'", "expected a number, but this is a text"),
        ("model in ['a', 1]", "1]", "expected a text"),
        ("model in ['a', model]", "model]", "expected a text"),
        ("model in model", "model", "expected a list"),
        ("tried_bytes is 1", "tried_bytes", "compare a number with == or != only"),
        ("None", "None", "expected a number, a text, True or False"),
        ("tried_bytes.__class__ == 'int'", ".__class__", "'.' is not allowed here"),
        ("tried_bytes > 1; True", "; True", "';' is not allowed here"),
        ("{1}", "{1}", "'{' is not allowed here"),
        ("__import__('os')", "__import__", "an expression compares facts"),
        ("exec('x') == 1", "exec", "an expression compares facts"),
        ("tried_bytes ** 9", "tried_bytes", "an expression compares facts"),
        ("tried_bytes // 9", "tried_bytes", "an expression compares facts"),
        ("1 << 9", "1", "an expression compares facts"),
        ("[1, 2]", "[1", "an expression compares facts"),
        ("(1, 2)", "(1", "an expression compares facts"),
        ("model[0]", "model", "an expression compares facts"),
        ("(yield 1)", "yield", "an expression compares facts"),
        ("[a for a in 'b']", "[a", "an expression compares facts"),
        ("f'x'", "f'", "an expression compares facts"),
        ("b'x'", "b'", "expected a number, a text"),
        ("0x10", "0x10", "'0' is not allowed here"),
        ("1_000", "1_000", "'1' is not allowed here"),
        ("1 if", "", "not an expression"),
        ("tried_bytes >", "", "not an expression"),
        ("import os", "import", "not an expression"),
        ("(tried_bytes > 1", "(", "not an expression"),
        ("1) + (2", ")", "not an expression"),
        ("1e999 > 2", "1e999", "the number is too large"),
        ("tr\u0456ed_bytes > 1", "\u0456", "is not allowed here"),
        ("\uff54ried_bytes > 1", "\uff54", "is not allowed here"),
        ("tried_bytes > 1 \x01", "", "is not allowed here"),
    ]:
        error = mistake(source)
        message, shown, caret = str(error).split("\n")
        assert said in message, source
        assert at in shown, source
        if at:
            end = source.rindex if source.startswith("model in model") else source.index
            assert (error.column, caret.index("^")) == (end(at) + 1, end(at) + 2), source


def test_the_nearest_fact_is_suggested_for_an_unknown_one():
    assert mistake("tried_byte > 1").hint == "did you mean 'tried_bytes'?"
    assert suggestion("tried_byte", ("tried_bytes", "model")) == "did you mean 'tried_bytes'?"
    assert suggestion("zzz", ("tried_bytes", "model")) is None


def test_error_in_a_long_expression_is_shown_with_context():
    error = mistake("tried_bytes > 1 and " * 90 + "nope > 1")

    assert error.column == 20 * 90 + 1
    assert len(str(error)) < 500
    assert str(error).splitlines()[-1].index("^") == str(error).splitlines()[-2].index("nope")


def test_length_and_nesting_are_bounded():
    for source in [
        "True or " * 400 + "True",
        "(" * 900 + "True" + ")" * 900,
        "(" * 30 + "True" + ")" * 30,
        "not " * 490 + "True",
        "-" * 1990 + "1",
        "1 + " * 490 + "1",
        "1 if True else " * 130 + "1",
        "2 ** " * 390 + "2",
        "9" * 1990,
    ]:
        assert len(str(mistake(source))) < 500, source[:20]
    assert value("(" * 9 + "True" + ")" * 9) is True
    assert value("1 + " * 50 + "1") == 51.0
    assert value(" or ".join(["tried_bytes > 1"] * 90), tried_bytes=2) is True


@settings(deadline=None)
@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_a_comparison_is_that_of_python(left, right):
    known = facts(tried_bytes=left, device_free_bytes=right)

    assert expression("tried_bytes > device_free_bytes").evaluate(known) is (left > right)


_WORDS = st.sampled_from(
    [
        *(
            "tried_bytes",
            "model",
            "prefix_caching",
            "1",
            "0",
            "1e308",
            "'x'",
            "True",
            "in",
            "is",
            "f",
            "é",
        ),
        *(
            "and",
            "or",
            "not",
            "if",
            "else",
            "==",
            "!=",
            "<",
            ">",
            "+",
            "-",
            "*",
            "/",
            "**",
            "(",
            ")",
            "[",
            "]",
        ),
        *("lambda", ":", ",", ".", "&&", "!", "\\", "\x00", "\n"),
    ]
)


@settings(deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(_WORDS, max_size=12).map(" ".join)))
def test_any_text_is_refused_or_gives_a_value_of_its_type(source):
    types = {"number": float, "bool": bool, "text": str}
    try:
        compiled = expression(source, None)
    except RuleError:
        return
    for known in ({}, facts(tried_bytes=2, model="x", prefix_caching=True)):
        found = compiled.evaluate(known)
        assert found is None or type(found) is types[compiled.kind]
