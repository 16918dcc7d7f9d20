"""Spans and marks of the user's own: any label, one use each, a function as well as a block."""

from __future__ import annotations

import pytest

import oomguard
from oomguard.core.errors import UsageError


def test_a_label_of_any_kind_is_text_in_every_form_of_the_report(tmp_path):
    labels = [7, None, b"x", ["l"], 1.5, ("a", 1)]
    with oomguard.watch() as seen:
        for label in labels:
            with seen.span(label):
                pass
            seen.mark(label)

    texts = list(map(str, labels))
    assert [row.what for row in seen.rows] == [mark.label for mark in seen.timeline.marks] == texts
    assert [text for text in texts if text not in str(seen)] == []
    for form in ("csv", "png", "trace"):
        getattr(seen, f"to_{form}")(tmp_path / form)


def test_a_span_is_used_once_and_says_so_when_it_is_used_again():
    ran = []
    with oomguard.watch() as seen:
        span = seen.span("papers")
        with span:
            ran.append(1)
        with pytest.raises(UsageError, match="'papers' was already used"), span:
            ran.append(2)
    assert (ran, [row.what for row in seen.rows]) == ([1], ["papers"])


def test_span_decorator_has_a_row_per_call_and_reraises():
    with oomguard.watch() as seen:

        @seen.span("half")
        def half(number: int) -> float:
            return 1 / number

        assert (half(2), half(4)) == (0.5, 0.25)
        with pytest.raises(ZeroDivisionError):
            half(0)
    assert [(row.what, row.error) for row in seen.rows] == [
        ("half", ""),
        ("half", ""),
        ("half", "ZeroDivisionError"),
    ]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "oomguard"]


def test_late_spans_and_marks_run_and_warn_once(caplog):
    with oomguard.watch() as seen:
        pass
    ran = []
    for label in ("later", "last"):
        with seen.span(label):
            ran.append(label)
        seen.mark(f"{label} mark")

    assert (ran, seen.rows, seen.timeline.marks) == (["later", "last"], (), ())
    span, mark = warnings_of(caplog)
    assert span.startswith(
        "oomguard: A span is not recorded because its watch is not active: label=later hint="
    )
    assert mark.startswith(
        'oomguard: A mark is not recorded because its watch is not active: label="later mark" hint='
    )


def test_mark_outside_a_watch_warns_and_reentered_watch_is_noted(
    caplog,
):
    seen = oomguard.watch()
    seen.mark("early")
    with seen:
        pass
    with seen:
        seen.mark("in time")

    assert [mark.label for mark in seen.timeline.marks] == ["in time"]
    assert len(warnings_of(caplog)) == 1


def test_span_decorator_keeps_result_and_exception(
    caplog,
):
    with oomguard.watch() as seen:

        @seen.span("half")
        def half(number: int) -> float:
            return 1 / number

    assert half(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        half(0)
    assert len(warnings_of(caplog)) == 1


def test_disabled_oomguard_reports_no_spans_or_marks(monkeypatch, caplog):
    monkeypatch.setenv("OOMGUARD_DISABLE", "1")
    with oomguard.watch() as seen, seen.span("work"):
        seen.mark("moment")
    assert warnings_of(caplog) == []


def test_label_that_cannot_be_text_replaces_no_exception():
    class Mute:
        def __str__(self) -> str:
            raise ValueError("no text")

    with oomguard.watch() as seen:
        pass
    with seen.span(Mute()):
        ran = True
    assert ran
