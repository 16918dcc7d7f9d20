"""Skimming a huge input: the lines near an anchor come as a reader of all lines would give them, and no others."""

from __future__ import annotations

import io
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oomguard.scan.anchors as skim_module
from oomguard.scan.anchors import LINES_AFTER, LINES_BEFORE, finder, skim
from oomguard.scan.source import Gap, Line, read_lines

ANCHOR = b"CUDA out of memory"
FINDER = finder((ANCHOR.decode(),))
# Blocks in which the lines that are looked at again always fit: the shortest is above 2 * (LINES_BEFORE + 2) lines.
BLOCKS = (1200, 1500, 2048, 5000, 1 << 16)

line = st.one_of(
    st.just(b"RuntimeError: CUDA out of memory. Tried"),
    st.just(b"CUDA out of"),
    st.just(b"memory"),
    st.just(b""),
    st.just("显存 🚀 naïve".encode()),
    st.just(b"\xff\xfe not text"),
    st.just(b" 10%\r 20%\r 30%"),
    st.just(b"windows\r"),
    st.integers(1, 60).map(lambda count: b"x" * count),
)
logs = st.builds(
    lambda mark, lines, end: mark + b"\n".join(lines) + end,
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(line, max_size=30).flatmap(
        lambda some: st.lists(st.sampled_from([*some, *[b"far from it"] * 60]), max_size=250)
    ),
    st.sampled_from([b"", b"\n", b"\r\n"]),
)


@pytest.fixture(autouse=True)
def _all_input_is_long(monkeypatch):
    monkeypatch.setattr(skim_module, "SHORT_BYTES", 1)


def skimmed(data: bytes, block_bytes: int, stream: io.BytesIO | None = None) -> list[Line | Gap]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skim_module, "BLOCK_BYTES", block_bytes)
        return list(skim(stream or io.BytesIO(data), lambda: FINDER))


def wanted(every: list[Line]) -> set[int]:
    """Numbers of the lines that a skim must give: those around each line with the anchor."""
    hits = {one.number for one in every if ANCHOR.decode() in one.text}
    return {n for hit in hits for n in range(hit - LINES_BEFORE, hit + LINES_AFTER + 1)}


@settings(deadline=None)
@given(logs, st.sampled_from(BLOCKS))
def test_lines_around_every_anchor_keep_numbers_and_offsets(data, block_bytes):
    every = list(read_lines(io.BytesIO(data)))
    came = [one for one in skimmed(data, block_bytes) if isinstance(one, Line)]

    assert [one for one in came if one not in every] == []
    assert came == sorted(set(came), key=lambda one: one.byte)
    assert wanted(every) & {one.number for one in every} <= {one.number for one in came}


@settings(deadline=None)
@given(logs, st.sampled_from(BLOCKS))
def test_what_was_left_out_is_told_by_a_gap(data, block_bytes):
    last: Line | None = None
    for one in skimmed(data, block_bytes):
        if isinstance(one, Gap):
            last = None
            continue
        assert last is None or one.number - last.number in {0, 1}
        last = one


@pytest.mark.parametrize("block_bytes", BLOCKS)
def test_lines_far_from_an_anchor_do_not_come(block_bytes):
    data = b"healthy\n" * 3000 + b"CUDA out of memory\n" + b"healthy\n" * 3000
    came = [one for one in skimmed(data, block_bytes) if isinstance(one, Line)]

    assert 0 < len(came) < 200
    assert came[0].number > 2800
    assert skimmed(b"healthy\n" * 3000, block_bytes) == []


@pytest.mark.parametrize("offset", range(-20, 21))
def test_an_anchor_over_the_edge_of_a_block_is_found(offset):
    head = (b"healthy line\n" * 200)[: 2000 + offset - 1] + b"\n"
    came = [
        one
        for one in skimmed(head + b"CUDA out\nof memory\n" + b"x\n" * 5, 2000)
        if isinstance(one, Line)
    ]

    assert "CUDA out" in [one.text for one in came]
    assert "of memory" in [one.text for one in came]


def test_stream_with_few_bytes_at_a_time_is_skimmed_alike():
    class Dripping(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 97) if size and size > 0 else size)

        def readinto(self, buffer) -> int:
            return super().readinto(memoryview(buffer)[:97])

    data = b"healthy\n" * 1000 + b"CUDA out of memory\n" + b"healthy\n" * 1000
    around = [one for one in skimmed(data, 2048, Dripping(data)) if isinstance(one, Line)]

    assert wanted(list(read_lines(io.BytesIO(data)))) <= {one.number for one in around}


def test_a_short_input_comes_whole_and_without_a_gap(monkeypatch):
    monkeypatch.setattr(skim_module, "SHORT_BYTES", 1 << 18)
    data = b"a\nb\nCUDA out of memory\n" + b"c\n" * 500

    assert skimmed(data, 1 << 16) == list(read_lines(io.BytesIO(data)))


def test_the_finder_of_a_short_input_is_never_made(monkeypatch):
    monkeypatch.setattr(skim_module, "SHORT_BYTES", 1 << 18)

    assert [
        one.text for one in skim(io.BytesIO(b"CUDA out of memory\n"), lambda: pytest.fail("made"))
    ]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_wide_text_is_read_line_by_line(encoding):
    data = "\ufeff healthy\nCUDA out of memory\n".encode(encoding)

    assert skimmed(data, 1200) == list(read_lines(io.BytesIO(data)))


def test_a_text_with_utf_16_in_it_is_read_line_by_line():
    data = b"healthy\n" * 9 + "CUDA out of memory\n".encode("utf-16-le")

    assert skimmed(data, 1200) == list(read_lines(io.BytesIO(data)))
    assert "CUDA out of memory" in [line.text for line in skimmed(data, 1200)]


def test_an_empty_input_has_no_lines():
    assert skimmed(b"", 1200) == []
    assert skimmed(b"\xef\xbb\xbf", 1200) == []


def test_line_longer_than_a_block_keeps_number_and_anchor():
    data = (
        b"one\n"
        + b"x" * 300_000
        + b" CUDA out of memory "
        + b"y" * 300_000
        + b"\nlast CUDA out of memory\n"
    )
    came = [one for one in skimmed(data, 1 << 17) if isinstance(one, Line)]
    inside = [one for one in came if one.number == 2]

    assert "CUDA out of memory" in "".join(one.text for one in inside)
    assert all(one.continued and data[one.byte :].startswith(one.text.encode()) for one in inside)
    assert (came[-1].number, came[-1].byte) == (3, data.index(b"last"))


def test_memory_is_constant_whatever_the_size():
    class Endless(io.RawIOBase):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.left = size

        def readable(self) -> bool:
            return True

        def readinto(self, buffer) -> int:
            count = min(len(buffer), self.left)
            buffer[:count] = (
                b"INFO a healthy line of an engine at work, as long as they are\n"
                * (count // 60 + 1)
            )[:count]
            self.left -= count
            return count

    def peak(size: int) -> int:
        tracemalloc.start()
        try:
            for _ in skim(Endless(size), lambda: FINDER):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(120 << 20) < 1.2 * peak(30 << 20)


@pytest.mark.parametrize(
    "anchor", [b"CUDA out of memory", b"CUDA out \x1b[1mof\x1b[0m memory", b"CUDA out of\n> memory"]
)
def test_short_input_comes_whole_if_it_has_an_anchor(monkeypatch, anchor):
    monkeypatch.setattr(skim_module, "SHORT_BYTES", 1 << 18)
    healthy = b"\x1b[2my\x1b[0m\n" * (skim_module.MANY_LINES + 1)
    data = healthy + anchor + b"\n"

    assert skimmed(data, 1 << 16) == list(read_lines(io.BytesIO(data)))
    assert skimmed(healthy, 1 << 16) == []
