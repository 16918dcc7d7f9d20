"""Where a value ends, in each notation it can stand in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.report.values import value_at


@pytest.mark.parametrize(
    ("text", "body", "rest"),
    [
        ("'a b' c", "a b", " c"),
        (r"'it\'s' c", r"it\'s", " c"),
        (r"'a\\' c", r"a\\", " c"),
        (r"\"a \\\"b\\\" c\" d", r"a \\\"b\\\" c", " d"),
        ("[1, [2], ']'] x", "1, [2], ']'", " x"),
        ("(don't) x", "don't", " x"),
        ("abc,def ghi", "abc,def", " ghi"),
        ("abc, def", "abc", ", def"),
        ("SecretStr('a)b') x", "SecretStr('a)b')", " x"),
        ("'cut off", "cut off", ""),
        ("[1, 2", "1, 2", ""),
        ("b'raw' x", "raw", " x"),
    ],
)
def test_a_value_ends_where_its_notation_ends_it(text, body, rest):
    value = value_at(text, 0)

    assert value is not None
    assert (text[value.start : value.end], text[value.after :]) == (body, rest)


@pytest.mark.parametrize("text", ["", " a", ",", "<pad>", "}"])
def test_where_no_value_begins_there_is_none(text):
    assert value_at(text, 0) is None


@given(st.text("ab'\"\\[](){} ,=", max_size=40))
def test_a_value_lies_within_its_text(text):
    value = value_at(text, 0)

    assert value is None or 0 <= value.start <= value.end <= value.after <= len(text)
