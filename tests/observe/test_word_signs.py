"""The words around a phrase as signs: names in their parts, figures alike, no more of a long line than counts."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from oomguard.observe.word_signs import BEFORE_CHARS, BEHIND_CHARS, word_signs, words_in

CLASSES = {"alloc": "allocate", "failed": "fail", "memory": "memory"}
SLOWEST_S = 0.5


def test_a_name_is_its_parts_and_every_figure_the_same():
    assert words_in("OutOfMemoryError: tried 2.5 GiB") == ["out", "of", "memory", "error", ":", "tried", "0", "gi", "b"]


def test_the_status_of_a_kill_stays_a_figure_of_its_own():
    assert words_in("exit code 137 of 400") == ["exit", "code", "137", "of", "0"]


def test_a_script_without_spaces_is_read_letter_by_letter():
    assert words_in("显存不足") == ["显", "存", "不", "足"]


def test_signs_say_on_which_side_of_the_phrase_a_word_stands():
    signs = word_signs("pool: alloc failed for 3 pages", 6, 18, CLASSES)

    assert {"<pool :", ">for 0", "=alloc failed", "~allocate fail 0"} <= signs


def test_a_phrase_that_is_the_whole_line_has_nothing_beside_it():
    assert {"<", ">"} <= word_signs("alloc failed.", 0, 12, CLASSES)


def test_what_stands_far_from_the_phrase_does_not_count():
    line = "far " + " " * BEFORE_CHARS + "alloc failed" + " " * BEHIND_CHARS + " away"
    begin = line.index("alloc")

    assert not {"=far", "=away"} & word_signs(line, begin, begin + 12, CLASSES)


@given(st.text(max_size=400), st.integers(0, 400), st.integers(0, 400))
def test_no_sign_holds_what_parts_the_lines_of_the_weights(line, begin, length):
    signs = word_signs(line, min(begin, len(line)), min(begin + length, len(line)), CLASSES)

    assert not any(char in sign for sign in signs for char in "\t\n\r")


def test_a_long_line_of_anything_is_read_in_no_time():
    for atom in ("a", "A", "1,", "1.", "_", "é", "{"):
        began = time.thread_time()
        word_signs(atom * 6000, 3000, 3004, CLASSES)
        assert time.thread_time() - began < SLOWEST_S, atom
