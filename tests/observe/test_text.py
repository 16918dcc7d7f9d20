"""Peeling one raw line: escapes and prefixes go, words stay, the process that a prefix names is kept."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.observe.text import peel, strip_escapes

ERROR = "ERROR 03-04 10:00:01 [core.py:700] "


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("\x1b[31mERROR\x1b[0m boom", "ERROR boom"),
        ("\x1b[38;5;208;1mboom\x1b[m", "boom"),
        ("\x1b[2K\x1b[1Gboom", "boom"),
        ("\x1b[?25lboom\x1b[?25h", "boom"),
        ("\x1b]0;a window title\x07boom", "boom"),
        ("\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\x08b\x00c\x7fd", "abcd"),
        ("a\x85b\x9bc", "abc"),
        ("boom\x1b", "boom"),
        ("a\tb", "a\tb"),
        ("naïve 显存 🚀", "naïve 显存 🚀"),
    ],
)
def test_escapes_and_control_characters_are_peeled(raw, plain):
    assert strip_escapes(raw) == plain


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\n")))
def test_no_control_character_but_tab_is_left(line):
    left = strip_escapes(line)

    assert [char for char in left if unicodedata.category(char) == "Cc" and char != "\t"] == []


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\n")))
def test_stripping_twice_is_stripping_once(line):
    assert strip_escapes(strip_escapes(line)) == strip_escapes(line)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cc"])))
def test_a_line_without_control_characters_is_left_alone(line):
    assert strip_escapes(line) == line


@pytest.mark.parametrize(
    ("prefix", "process"),
    [
        ("(EngineCore pid=1) ", "EngineCore pid=1"),
        ("(EngineCore_DP0 pid=1) ", "EngineCore_DP0 pid=1"),
        ("(APIServer pid=4321) ", "APIServer pid=4321"),
        ("(VllmWorker rank=0 pid=1) ", "VllmWorker rank=0 pid=1"),
        ("(VllmWorker TP0 pid=1) ", "VllmWorker TP0 pid=1"),
        ("(VllmWorker-0 pid=1) ", "VllmWorker-0 pid=1"),
        ("(Worker_TP0_EP0 pid=1) ", "Worker_TP0_EP0 pid=1"),
        ("(VllmWorkerProcess pid=1) ", "VllmWorkerProcess pid=1"),
        ("[rank0]: ", "rank0"),
        ("[rank12]: ", "rank12"),
        (ERROR, None),
        ("INFO 03-04 10:00:01.123 [a/b/core.py:7] ", None),
        (f"(EngineCore pid=1) {ERROR}", "EngineCore pid=1"),
        (f"{ERROR}(EngineCore pid=1) ", "EngineCore pid=1"),
        ("[rank0]: (EngineCore pid=1) ", "rank0"),
        (f"(EngineCore pid=1) [rank0]: {ERROR}", "EngineCore pid=1"),
        (f"\x1b[1;36m(EngineCore_DP0 pid=1)\x1b[0;0m {ERROR}", "EngineCore_DP0 pid=1"),
        ("(EngineCore pid=1) (RayWorkerWrapper pid=2) ", "EngineCore pid=1"),
    ],
)
def test_prefixes_are_peeled_and_the_first_process_is_kept(prefix, process):
    plain = peel(f"{prefix}ValueError: boom (a) [b]")

    assert plain.text == "ValueError: boom (a) [b]"
    assert plain.process == process


def test_the_indent_after_a_prefix_is_kept():
    assert peel("(EngineCore pid=1)     raise ValueError(").text == "    raise ValueError("


def test_a_line_that_is_only_a_prefix_is_empty():
    assert peel("(EngineCore pid=1)").text == ""


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: (EngineCore pid=1) is in the middle",
        "(an aside) ValueError",
        "(pid=1) ValueError",
        "rank0: ValueError",
        "[rankx]: ValueError",
        "ERROR in core",
        "",
    ],
)
def test_what_is_no_prefix_stays(line):
    assert peel(line) == type(peel(""))(line, None)


@settings(deadline=None)
@given(st.text(max_size=80))
def test_peeling_only_ever_removes_from_the_front(line):
    assert strip_escapes(line).endswith(peel(line).text)
