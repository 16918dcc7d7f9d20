"""Spans and marks of the user's own: any label, one use each, a function as well as a block."""

from __future__ import annotations

import pytest

import oomguard
from oomguard.errors import UsageError


@pytest.mark.parametrize("label", [7, None, b"x", ["l"], 1.5, ("a", 1)])
def test_a_label_of_any_kind_is_text_in_every_form_of_the_report(tmp_path, label):
    with oomguard.watch() as seen:
        with seen.span(label):
            pass
        seen.mark(label)

    assert seen.rows[0].what == seen.timeline.marks[0].label == str(label)
    assert str(label) in str(seen)
    for form in ("csv", "html", "png"):
        getattr(seen, f"to_{form}")(tmp_path / form)


def test_a_span_is_used_once_and_says_so_when_it_is_used_again():
    ran = []
    with oomguard.watch() as seen:
        span = seen.span("papers")
        with span:
            ran.append(1)
        with pytest.raises(UsageError, match="'papers' was used before: a span is used once"), span:
            ran.append(2)
    assert (ran, [row.what for row in seen.rows]) == ([1], ["papers"])


def test_a_span_as_a_decorator_has_a_row_for_each_call_and_raises_what_the_function_raises():
    with oomguard.watch() as seen:

        @seen.span("half")
        def half(number: int) -> float:
            return 1 / number

        assert (half(2), half(4)) == (0.5, 0.25)
        with pytest.raises(ZeroDivisionError):
            half(0)
    assert [(row.what, row.error) for row in seen.rows] == [("half", ""), ("half", ""), ("half", "ZeroDivisionError")]
