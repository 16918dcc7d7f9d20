"""Bytes to numbered lines: however the bytes arrive, and however long a line is."""

from __future__ import annotations

import io
import time
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import InputError
from oomguard.scan.source import MAX_SEGMENT_CHARS, Line, LineSplitter, open_log, read_lines


def split(*chunks: bytes, encoding: str = "utf-8") -> list[Line]:
    splitter = LineSplitter(encoding)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + list(splitter.feed(b"", final=True))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[start:end] for start, end in pairwise(at)]


def read(data: bytes) -> list[Line]:
    return list(read_lines(io.BytesIO(data)))


log_bytes = st.binary(max_size=80) | st.text("ab\r\n é\U0001f600\u2028", max_size=60).map(
    str.encode
)


def test_lines_are_numbered_from_1_and_placed_by_byte():
    assert split(b"one\ntwo\n\nfour\n") == [
        Line(1, 0, "one"),
        Line(2, 4, "two"),
        Line(3, 8, ""),
        Line(4, 9, "four"),
    ]


def test_a_last_line_without_a_newline_is_a_line():
    assert split(b"one\ntwo") == [Line(1, 0, "one"), Line(2, 4, "two")]


def test_nothing_has_no_lines():
    assert split(b"") == []
    assert read(b"") == []


def test_windows_line_ends_are_no_part_of_the_line():
    assert split(b"one\r\ntwo\r\n") == [Line(1, 0, "one"), Line(2, 5, "two")]


def test_a_line_end_cut_between_two_chunks_is_one_line_end():
    assert split(b"one\r", b"\ntwo") == [Line(1, 0, "one"), Line(2, 5, "two")]


def test_carriage_returns_of_a_progress_bar_end_segments():
    lines = split(b" 10%|#  |\r100%|###|\rERROR boom\nnext\n")

    assert [line.text for line in lines] == [" 10%|#  |", "100%|###|", "ERROR boom", "next"]
    assert [line.number for line in lines] == [1, 1, 1, 2]


def test_a_line_separator_of_unicode_does_not_end_a_line():
    assert [line.text for line in split("a\u2028b\x85c\n".encode())] == ["a\u2028b\x85c"]


def test_a_character_cut_between_two_chunks_is_whole():
    raw = "é🚀\n".encode()

    assert split(*(raw[i : i + 1] for i in range(len(raw)))) == [Line(1, 0, "é🚀")]


def test_bytes_after_a_wide_character_are_counted_in_bytes():
    assert split("é🚀\nb".encode())[1] == Line(2, 7, "b")


def test_invalid_bytes_are_replaced_and_the_rest_is_read():
    assert [line.text for line in split(b"a\xffb\nc\n")] == ["a\ufffdb", "c"]


def test_a_truncated_last_character_is_replaced():
    assert [line.text for line in split(b"a\xe2\x82")] == ["a\ufffd"]


def test_the_byte_after_invalid_bytes_is_right():
    assert split(b"a\xffb\nc\n")[1].byte == 4


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_told_by_its_null_bytes(encoding):
    lines = read("INFO a start\nthe second line, with é\n".encode(encoding))

    assert [line.text for line in lines] == ["INFO a start", "the second line, with é"]
    assert [line.byte for line in lines] == [0, 26]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_that_was_appended_to_another_encoding_is_read(encoding):
    lines = read(b"plain\n" + "CUDA out of memory\n".encode(encoding) + b"plain again\n")

    assert [line.text.strip() for line in lines] == ["plain", "CUDA out of memory", "plain again"]
    assert [line.number for line in lines] == [1, 2, 3]


def test_a_null_byte_in_a_line_is_left_out_and_counted():
    lines = read(b"a\0b\nc\n")

    assert [(line.text, line.byte) for line in lines] == [("ab", 0), ("c", 4)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_with_a_mark_is_read(encoding):
    mark = {"utf-16": b"", "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}[encoding]

    assert [line.text for line in read(mark + "one é\r\ntwo\r\n".encode(encoding))] == [
        "one é",
        "two",
    ]


def test_the_byte_of_a_utf16_line_is_right():
    assert read("one\ntwo\n".encode("utf-16"))[1].byte == 10


def test_the_mark_of_utf8_is_no_part_of_the_text():
    assert read(b"\xef\xbb\xbfone\n")[0].text == "one"


def test_the_byte_after_the_mark_of_utf8_is_right():
    assert read(b"\xef\xbb\xbfone\ntwo\n")[1].byte == 7


def test_a_long_line_comes_in_segments_that_go_on():
    long = "x" * (2 * MAX_SEGMENT_CHARS + 5)
    lines = split(f"{long}\nnext\n".encode())

    assert "".join(line.text for line in lines[:3]) == long
    assert [(line.number, line.byte, line.continued) for line in lines] == [
        (1, 0, False),
        (1, MAX_SEGMENT_CHARS, True),
        (1, 2 * MAX_SEGMENT_CHARS, True),
        (2, len(long) + 1, False),
    ]


def test_segments_of_wide_characters_are_placed_by_byte():
    lines = split(("é" * (MAX_SEGMENT_CHARS + 1)).encode() + b"\nnext")

    assert [line.byte for line in lines] == [0, 2 * MAX_SEGMENT_CHARS, 2 * MAX_SEGMENT_CHARS + 3]


def test_a_line_of_exactly_one_segment_is_one_line():
    lines = split(b"x" * MAX_SEGMENT_CHARS + b"\nnext")

    assert [(line.number, line.continued) for line in lines] == [(1, False), (2, False)]


@settings(deadline=None)
@given(log_bytes, st.lists(st.integers(0, 80), max_size=8))
def test_any_chunks_of_the_same_bytes_give_the_same_lines(data, places):
    assert split(*cut(data, places)) == split(data)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(-3, 3),
    st.sampled_from([b"\n", b"\r\n", b"\r", b"", "é".encode()]),
    st.integers(500, 20_000),
)
def test_any_chunks_of_a_long_line_give_the_same_lines(delta, end, size):
    data = b"x" * (MAX_SEGMENT_CHARS + delta) + end + b"y" * 40_000

    assert split(*(data[i : i + size] for i in range(0, len(data), size))) == split(data)


@settings(deadline=None)
@given(st.text("ab\r\n é\U0001f600", max_size=60))
def test_each_line_is_found_at_its_byte(text):
    data = text.encode()

    for line in split(data):
        assert data[line.byte :].startswith(line.text.encode())


@settings(deadline=None)
@given(st.text("ab\n é", max_size=60))
def test_lines_joined_again_are_the_text(text):
    assert "\n".join(line.text for line in split(text.encode())) == text.removesuffix("\n")


class Endless:
    """A stream of one line of ``size`` bytes that never exists as a whole."""

    def __init__(self, size: int) -> None:
        self.left = size

    def read(self, size: int) -> bytes:
        given_bytes = min(size, self.left)
        self.left -= given_bytes
        return b"x" * given_bytes


def test_a_line_of_200_mb_is_read_in_bounded_memory_and_time():
    start = time.process_time()
    tracemalloc.start()
    try:
        chars = sum(len(line.text) for line in read_lines(Endless(200_000_000)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert chars == 200_000_000
    assert peak < 50_000_000
    assert time.process_time() - start < 15


def test_a_log_is_opened_for_reading(tmp_path):
    (tmp_path / "a.log").write_bytes(b"one\n")

    with open_log(str(tmp_path / "a.log")) as stream:
        assert list(read_lines(stream)) == [Line(1, 0, "one")]


def test_a_missing_log_is_an_input_error_that_names_it(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.log: No such file") as caught:
        open_log(str(tmp_path / "nowhere.log"))

    assert caught.value.hint


def test_a_folder_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        open_log(str(tmp_path))


def test_a_name_that_is_too_long_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="name too long"):
        open_log(str(tmp_path / ("n" * 300)))


def test_a_name_with_a_null_byte_is_an_input_error():
    with pytest.raises(InputError):
        open_log("a\0b")
