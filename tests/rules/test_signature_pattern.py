"""Patterns of signatures: compiled only where that ends, and sizes read whole."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.errors import RuleError
from oomguard.rules.rule_files import load_rules
from oomguard.rules.signature import MAX_REPEATED_CHARS, compile_pattern, too_much_repetition


def pattern(text: str):
    return compile_pattern(text, path="rule.toml", key="wording[0].pattern")


def refused(text: str) -> RuleError:
    with pytest.raises(RuleError) as caught:
        pattern(text)
    assert (caught.value.path, caught.value.key) == ("rule.toml", "wording[0].pattern")
    return caught.value


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("(?:abc){99999999}", 8),
        ("a{1,100000000}", 2),
        ("a{,99999}", 2),
        ("a{99999,}", 2),
        ("a{99999999999999999999999}", 2),
        ("a{" + "9" * 3900 + "}", 2),
        ("(?:(?:a{1,99}){1,99}){1,99}", 22),
        ("(?i:a{200}){200}", 12),
        ("(?P<_x>a{200}|b){200}", 17),
        (r"[)]{99999}", 4),
        (r"(?:[)]a{200}){200}", 14),
        (r"(?:[]()]a{200}){200}", 16),
        (r"(?:\)a{200}){200}", 13),
        ("(?#()(?:a{200}){200}", 16),
        (r"{size} (?:abc){99999}", 15),
        ("a{9999}" * 3, 16),
    ],
)
def test_huge_repetition_is_refused_at_its_column(text, column):
    began = time.process_time()

    error = refused(text)

    assert time.process_time() - began < 1
    assert error.column == column
    assert f"longer than {MAX_REPEATED_CHARS} characters with its repetitions written out" in str(
        error
    )


@pytest.mark.parametrize(
    "text",
    [
        r"a{3}",
        r"(?:[^\n]{0,200}\n){0,40}",
        r"[^\n]{0,6000}",
        r"[{99999}]",
        r"\{99999\}",
        "x{}",
        "x{n}",
        "a{200}b{200}" * 9,
    ],
)
def test_what_an_honest_pattern_repeats_is_compiled(text):
    assert pattern(text)


@pytest.mark.parametrize("text", ["(?x)a", "(?ix:a)", "(?V1)[a]", "a(?sx-i:b)"])
def test_flags_that_change_the_grammar_are_refused(text):
    assert "flags x and V1" in str(refused(text))


def test_flags_that_contradict_are_refused():
    assert "incompatible" in str(refused("(?au)x"))


@pytest.mark.parametrize(
    ("text", "column"), [("ab(", 4), ("{size} *+*", 10), ("{size}{size} [z-a]", 18)]
)
def test_column_of_an_error_counts_in_the_pattern_as_written(text, column):
    assert refused(text).column == column


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_nested_repetitions_are_multiplied(a, b, c):
    long = max(a, 1) * max(b, 1) * max(c, 1) > MAX_REPEATED_CHARS

    assert (too_much_repetition(f"(?:(?:x{{{a}}}){{0,{b}}}){{{c},}}") is not None) is long


@given(st.text(alphabet="ab(){}[]\\?:|*+^0123456789,#P<>=! \n", max_size=60))
def test_any_text_is_compiled_or_refused_in_time(text):
    began = time.thread_time()

    with contextlib.suppress(RuleError):
        pattern(text)

    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("x 24.56 MiB free", "24.56 MiB"),
        ("x -3.79 GiB free", "-3.79 GiB"),
        ("x 1,024 bytes free", "1,024 bytes"),
        ("x5,3 GiB free", "5,3 GiB"),
        ("x 1.2.3 GiB free", "2.3 GiB"),
        ("x,5 GiB free", "5 GiB"),
        ("x 17179869184 free", "17179869184"),
    ],
)
def test_a_size_is_read_whole(text, size):
    assert pattern("(?P<tried>{size}) free").search(text)["tried"] == size


@pytest.mark.parametrize("row", ["0" * 20_000, "0," * 10_000, "0.0" * 7000, "-0" * 10_000])
def test_size_pattern_is_searched_in_linear_time(row):
    began = time.thread_time()

    assert pattern("(?P<tried>{size}) allowed;").search(f"{row}| allowed;") is None

    assert time.thread_time() - began < 0.2


def test_no_shipped_pattern_is_near_the_limit_of_repetition():
    rules = load_rules()
    texts = [w.pattern.pattern for s in rules.signatures for w in s.wordings]
    texts += [clause.pattern for s in rules.signatures for clause in s.clauses]
    texts += [quotation.pattern.pattern for quotation in rules.quotations]

    assert all(too_much_repetition(f"(?:{text}){{2}}") is None for text in texts)
