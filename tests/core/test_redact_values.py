"""Where a value ends, in each notation it can stand in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.redact import value_at


def test_a_value_ends_where_its_notation_ends_it():
    for text, body, rest in [
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
    ]:
        value = value_at(text, 0)

        assert value is not None, (text, body, rest)
        assert (text[value.start : value.end], text[value.after :]) == (body, rest), (
            text,
            body,
            rest,
        )


def test_where_no_value_begins_there_is_none():
    for text in ["", " a", ",", "<pad>", "}"]:
        assert value_at(text, 0) is None, text


@given(st.text("ab'\"\\[](){} ,=", max_size=40))
def test_a_value_lies_within_its_text(text):
    value = value_at(text, 0)

    assert value is None or 0 <= value.start <= value.end <= value.after <= len(text)
