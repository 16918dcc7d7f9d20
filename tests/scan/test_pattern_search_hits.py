"""One wording on a window: its place, its facts with those of its clauses, and what quotes it."""

from __future__ import annotations

import time

import pytest

import oomguard.scan.pattern_search as search_time
from oomguard.core.facts import GIB
from oomguard.rules.signature import Quotation, Signature, Wording, compile_pattern
from oomguard.scan.lines import peel
from oomguard.scan.pattern_search import Hit, SearchTime, Window, match, open_window, quoted
from oomguard.scan.source import Line


def pattern(text: str):
    return compile_pattern(text, path="x.toml", key="pattern")


def wording(text: str, **values) -> Wording:
    return Wording("boom", pattern(text), "a test", **values)


def signature(*wordings: Wording, clauses: tuple[str, ...] = ()) -> Signature:
    return Signature(
        "x.toml",
        "cuda_oom",
        "torch",
        "unknown",
        wordings,
        (),
        tuple(pattern(clause) for clause in clauses),
    )


def window(*texts: str, anchor: int = 0) -> Window:
    rows = [(i, Line(i, 0, text), peel(text)) for i, text in enumerate(texts, 1)]
    opened = open_window(rows[: anchor + 1], [])
    for order, line, plain in rows[anchor + 1 :]:
        opened.extend(line, plain, order)
    return opened


def hit(
    text: str, *lines: str, clauses: tuple[str, ...] = (), anchor: int = 0, **values
) -> Hit | None:
    told = wording(text, **values)
    return match(
        signature(told, clauses=clauses), told, window(*lines, anchor=anchor), SearchTime()
    )


def no_slow_one(slow: Quotation) -> None:
    pytest.fail(f"{slow.name} was left out")


def values(found: Hit) -> dict[str, object]:
    return {name: fact.value for name, fact in found.facts.items()}


def test_a_hit_tells_its_lines_its_message_and_its_facts():
    found = hit(r"boom: (?P<tried>{size})", "before", "x boom:", "  2.00 GiB y", anchor=1)

    assert (found.first, found.last, found.message) == (1, 2, "boom: 2.00 GiB")
    assert values(found) == {"tried_bytes": 2 * GIB}
    assert (found.kind, found.framework) == ("cuda_oom", "torch")


def test_a_wording_may_have_a_kind_and_a_framework_of_its_own():
    found = hit("boom", "boom", kind="hip_oom", framework="vllm")

    assert (found.kind, found.framework) == ("hip_oom", "vllm")


@pytest.mark.parametrize("lines", [("boom", "behind the anchor"), ("far", "x", "boom")])
def test_what_does_not_touch_the_anchors_line_is_no_hit(lines):
    anchor = 0 if lines[0] == "far" else 1

    assert hit("boom", *lines, anchor=anchor) is None


def test_a_message_that_begins_before_the_anchors_line_is_a_hit():
    found = hit("start of boom", "start", "of boom", anchor=1)

    assert (found.first, found.last) == (0, 1)


def test_earlier_message_does_not_hide_the_anchors_one():
    found = hit(r"boom (?P<tried>{size})", "boom 1.00 GiB", "boom 2.00 GiB", anchor=1)

    assert values(found) == {"tried_bytes": 2 * GIB}


def test_clauses_are_read_anywhere_and_extend_the_message():
    found = hit(
        "boom",
        "boom; x free 1.00 GiB of",
        "total 4.00 GiB.",
        clauses=(
            "total (?P<device_total>{size})",
            "free (?P<device_free>{size})",
            "absent (?P<tried>{size})",
        ),
    )

    assert values(found) == {"device_total_bytes": 4 * GIB, "device_free_bytes": GIB}
    assert found.message == "boom; x free 1.00 GiB of total 4.00 GiB"
    assert found.last == 1


def test_the_clauses_of_the_next_message_are_not_taken():
    told = wording(r"boom (?P<tried>{size})")
    both = signature(told, clauses=("free (?P<device_free>{size})",))
    found = match(both, told, window("boom 1.00 GiB. boom 2.00 GiB. free 3.00 GiB"), SearchTime())

    assert values(found) == {"tried_bytes": GIB}


def test_clauses_far_behind_are_not_taken():
    assert (
        values(
            hit(
                "boom",
                "boom" + " x" * 2000 + " free 3.00 GiB",
                clauses=("free (?P<device_free>{size})",),
            )
        )
        == {}
    )


def test_the_wordings_own_figure_wins_over_a_clauses():
    found = hit(
        r"boom (?P<tried>{size})",
        "boom 1.00 GiB tried 2.00 GiB",
        clauses=("tried (?P<tried>{size})",),
    )

    assert values(found) == {"tried_bytes": GIB}


def test_a_group_that_repeats_adds_up_bytes():
    found = hit(
        r"boom(?:.*?Process \d+ has (?P<other_process_in_use>{size}))+",
        "boom Process 1 has 1.00 GiB. Process 2 has 2.00 GiB",
    )

    assert values(found) == {"other_process_in_use_bytes": 3 * GIB}


def test_facts_of_the_wording_itself_are_printed_facts():
    found = hit("boom", "boom", facts={"prefix_caching": True})

    assert values(found) == {"prefix_caching": True}
    assert found.facts["prefix_caching"].source == "printed"


def test_a_figure_that_cannot_be_read_is_left_out():
    assert values(hit(r"boom (?P<tried>\S+)", "boom nonsense")) == {}


def quotation(part: str, text: str, **limits: int) -> Quotation:
    return Quotation("a test", pattern(text), part, (), (), **limits)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("line", r"^if torch\.Error: boom:$"),
        ("before", r"^if torch\.Error: \Z"),
        ("lead", r"^if \Z"),
        ("around", r"^if torch\.Error: \x00:$"),
        ("raw", r"^> if torch\.Error: boom:$"),
    ],
)
def test_each_part_of_the_line_can_be_asked(part, text):
    opened = window("> if torch.Error: boom:")
    told = wording("boom")

    assert (
        quoted(
            match(signature(told), told, opened, SearchTime()),
            opened,
            (quotation(part, text),),
            SearchTime(),
            no_slow_one,
        )
        == "a test"
    )


def test_exception_name_inside_a_wording_is_not_its_prefix():
    opened = window("if torch.OutOfMemoryError: boom")
    told = wording("OutOfMemoryError: boom")
    found = match(signature(told), told, opened, SearchTime())

    assert (
        quoted(
            found,
            opened,
            (quotation("before", r"OutOfMemoryError: \Z"),),
            SearchTime(),
            no_slow_one,
        )
        == "a test"
    )
    assert (
        quoted(found, opened, (quotation("lead", r"^if \Z"),), SearchTime(), no_slow_one)
        == "a test"
    )


def test_a_report_with_enough_figures_is_no_quotation():
    opened = window("if boom 1.00 GiB")
    told = wording(r"boom (?P<tried>{size})")
    found = match(signature(told), told, opened, SearchTime())

    assert (
        quoted(found, opened, (quotation("lead", "if", below_facts=1),), SearchTime(), no_slow_one)
        is None
    )
    assert (
        quoted(found, opened, (quotation("lead", "if", below_facts=2),), SearchTime(), no_slow_one)
        == "a test"
    )


def test_a_pattern_out_of_time_vetoes_nothing(monkeypatch):
    monkeypatch.setattr(search_time, "SEARCH_TIMEOUT_S", 0.01)
    opened = window("a" * 5000 + " boom")
    told = wording("boom")
    slow = quotation("before", r"(?:a|a|aa)+\d\Z")

    left_out: list[Quotation] = []
    found = match(signature(told), told, opened, SearchTime())

    assert quoted(found, opened, (slow,), SearchTime(), left_out.append) is None
    assert left_out == [slow]


@pytest.mark.parametrize("word", ["a", "_", "a.", "0"])
def test_a_long_word_before_a_message_is_looked_at_once(word):
    opened = window(word * (60_000 // len(word)) + " boom")
    told = wording("boom")
    found = match(signature(told), told, opened, SearchTime())
    begun = time.process_time()

    assert quoted(found, opened, (quotation("lead", "never"),), SearchTime(), no_slow_one) is None
    assert time.process_time() - begun < 1
