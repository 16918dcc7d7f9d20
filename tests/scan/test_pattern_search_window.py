"""The lines around an anchor: those of the same process, joined, peeled, and never more than a few."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.diagnosis import diagnose
from oomguard.scan.context import ECHO_ANCHOR
from oomguard.scan.lines import peel
from oomguard.scan.pattern_search import (
    CONTEXT_LINES,
    WINDOW_CHARS,
    WINDOW_LINES,
    Window,
    open_window,
)
from oomguard.scan.source import Line

CORE, RANK = "(EngineCore pid=1) ", "(Worker_TP0 pid=2) "


def row(order: int, text: str, *, continued: bool = False) -> tuple[int, Line, Any]:
    return order, Line(order, 10 * order, text, continued), peel(text)


def candidate(kind: str | None = "cuda_oom", anchor: str = "boom") -> Any:
    return SimpleNamespace(kind=kind), SimpleNamespace(anchor=anchor)


def window(*texts: str, kind: str | None = "cuda_oom", anchor: str = "boom") -> Window:
    return open_window([row(i, text) for i, text in enumerate(texts, 1)], [candidate(kind, anchor)])


def extend(opened: Window, *texts: str) -> list[bool]:
    """Whether the window was complete after each of the lines."""
    told = []
    for order, line, plain in (
        row(i, text) for i, text in enumerate(texts, opened.orders[opened.anchor] + 1)
    ):
        opened.extend(line, plain, order)
        told.append(opened.complete)
    return told


def test_lines_before_belong_where_the_same_process_wrote_them():
    opened = window(CORE + "a", RANK + "b", "c", CORE + "boom")

    assert opened.text == "a\nboom"
    assert opened.process == "EngineCore pid=1"
    assert opened.orders == [1, 4]


def test_the_anchors_line_is_known_in_the_joined_text():
    opened = window("before", "boom here")
    extend(opened, "behind")
    start, end = opened.anchor_span

    assert opened.text[start:end] == "\nboom here"
    assert [opened.index(opened.text.index(word)) for word in ("before", "boom", "behind")] == [
        0,
        1,
        2,
    ]
    assert opened.index(10_000) == 2


def test_line_around_a_position_is_shown_with_it():
    opened = window("before", "x boom y")
    extend(opened, "behind")

    assert opened.line_around(opened.text.index("boom")) == ("x boom y", 2)
    assert opened.line_around(0) == ("before", 0)
    assert opened.line_around(opened.text.index("behind"))[0] == "behind"


def test_lines_of_other_processes_are_passed_over():
    opened = window(CORE + "boom")
    extend(opened, RANK + "a", CORE + "b", "(APIServer pid=3) c")

    assert opened.text == "boom\nb"


def test_an_indented_line_without_a_prefix_is_a_wrapped_one():
    opened = window(CORE + "boom")

    assert extend(opened, "    goes on") == [False]
    assert opened.text == "boom\n    goes on"


def test_a_line_without_a_prefix_ends_the_window_of_a_process():
    assert extend(window(CORE + "boom"), "something else") == [True]
    assert extend(window(CORE + "boom"), "") == [False]


def test_segment_of_a_too_long_line_is_joined_without_a_break():
    opened = open_window([row(1, "bo"), row(1, "om", continued=True)], [candidate()])
    opened.extend(Line(1, 9, "er", continued=True), peel("er"), 3)

    assert opened.text == "boomer"


@pytest.mark.parametrize(
    ("kind", "anchor", "limit"),
    [
        ("cuda_oom", "boom", WINDOW_LINES),
        (None, "boom", CONTEXT_LINES),
        (None, ECHO_ANCHOR, WINDOW_LINES),
    ],
)
def test_a_window_ends_after_a_few_lines_of_its_own(kind, anchor, limit):
    told = extend(window("boom", kind=kind, anchor=anchor), *["next"] * (limit + 1))

    assert told.index(True) == limit - 1


def test_a_window_ends_after_many_characters():
    opened = window("boom")

    assert extend(opened, "x" * WINDOW_CHARS * 2) == [True]
    assert len(opened.text) <= len("boom\n") + WINDOW_CHARS


def test_message_wrapped_after_its_process_is_continued():
    opened = window(RANK + "boom")

    assert extend(
        opened,
        "GPU 0 has a total capacity of 31.35 GiB",
        "... this process has 23.32 GiB",
        "a line",
    ) == [
        False,
        False,
        True,
    ]
    assert (
        opened.text
        == "boom\nGPU 0 has a total capacity of 31.35 GiB\n... this process has 23.32 GiB"
    )


MESSAGES = (
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 2 has a total capacity of 47.50 GiB of which 130.00 MiB"
        " is free. Process 71 has 9.25 GiB memory in use. Including non-PyTorch memory, this process has 38.00 GiB memory in use. Of the"
        " allocated memory 36.50 GiB is allocated by PyTorch, with 1.25 GiB allocated in private pools (e.g., CUDA Graphs), and 750.00 MiB is"
        " reserved by PyTorch but unallocated."
    ),
    (
        "ValueError: To serve at least one request with the model's max seq len (65536), (9.00 GiB KV cache is needed, which is larger than the"
        " available KV cache memory (4.50 GiB). Based on the available memory, the estimated maximum model length is 32768."
    ),
    "ValueError: Free memory on device cuda:0 (20.50/47.50 GiB) on startup is less than desired GPU memory utilization (0.9, 42.75 GiB).",
)


@pytest.mark.parametrize(
    "prefix", ["[rank1]: ", "(EngineCore pid=31) ERROR 03-02 10:00:00 [core.py:900] "]
)
@given(width=st.integers(52, 130), message=st.sampled_from(MESSAGES))
def test_a_message_wrapped_behind_its_process_is_read_whole(prefix, width, message):
    whole, wrapped = (
        diagnose(prefix + text).incidents[0] for text in (message, textwrap.fill(message, width))
    )

    assert {k: f.value for k, f in wrapped.facts.items()} == {
        k: f.value for k, f in whole.facts.items()
    }


def test_message_cut_at_terminal_width_keeps_its_figures():
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 232.00 MiB. GPU 0 has a total capacity of 23.57 GiB of which"
        " 154.25 MiB is free. Including non-PyTorch memory, this process has 23.40 GiB memory in use. Of the allocated memory 22.88 GiB"
        " is allocated by PyTorch, and 188.29 MiB is reserved by PyTorch but unallocated."
    )
    names = {
        "tried_bytes", "device_total_bytes", "device_free_bytes", "process_in_use_bytes", "allocated_bytes", "reserved_unallocated_bytes",
    }  # fmt: skip
    whole = figures(message, names)
    assert whole.keys() == names
    columns = range(49, 131)
    cut = {
        column: "\n".join(message[at : at + column] for at in range(0, len(message), column))
        for column in columns
    }

    assert [column for column in columns if figures(cut[column], names) != whole] == []


def figures(text: str, names: set[str]) -> dict[str, object]:
    (incident,) = diagnose(text).incidents
    return {name: fact.value for name, fact in incident.facts.items() if name in names}


def test_lines_that_end_in_whole_words_stay_apart():
    opened = window("a long line of a log of more than forty characters, boom", "memory")
    extend(opened, "in use")
    assert opened.text.count("\n") == 2
