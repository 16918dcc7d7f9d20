"""The first line of a text as the title of a report: its marks quote nothing."""

from __future__ import annotations

import pytest

from oomguard.diagnosing import diagnose
from oomguard.observe.title import is_title, mark_chars

MESSAGE = "RuntimeError: CUDA error: out of memory"


@pytest.mark.parametrize("marks", ["[Bug]: ", "[Bug] ", "# [BUG] ", "# Bug: ", "Eval bug: ", "[Usage]: ", "[CI Bug]: "])
def test_a_trackers_mark_makes_the_first_line_a_title(marks):
    assert is_title(marks + MESSAGE, "", "\nIt stops on two nodes.")
    assert mark_chars(marks + MESSAGE) == len(marks)


def test_a_heading_is_a_title_only_above_a_run():
    assert is_title(f"# {MESSAGE}", "", "\nexport CUDA_VISIBLE_DEVICES=1\npython -m server")
    assert not is_title(f"# {MESSAGE}", "", "\nThis page tells what to do about it.")


@pytest.mark.parametrize("line", ["[Feature]: catch it", "[RFC]: a pool", "- [Bug]: item", "bugs: 3"])
def test_other_marks_make_no_title(line):
    assert not is_title(line, "", "")


def test_below_other_lines_the_same_marks_are_none():
    assert not is_title("[Bug]: x", "Open issues", "")


def test_of_a_list_of_titles_none_reports():
    assert not is_title("[Bug]: x", "", "\n[Bug]: y")
    assert not diagnose(f"[Bug]: {MESSAGE}\n[Bug]: wrong output with fp8\n").incidents


def test_a_title_is_diagnosed():
    (found,) = diagnose(f"[Bug]: {MESSAGE}\nThe second start on the same node stops.\n").incidents

    assert found.kind == "cuda_oom"
