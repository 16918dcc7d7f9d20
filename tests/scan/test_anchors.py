"""The two finders find every anchor, at the same places, whatever stands between its words."""

from __future__ import annotations

import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oomguard.diagnosis import default_rules
from oomguard.scan.anchors import fast_scanning, finder, flexible

ANCHORS = default_rules().anchors
needs_the_library = pytest.mark.skipif(
    not fast_scanning(), reason="the multi-pattern library has no wheel here"
)
GAPS = (" ", "\n", "\r\n", "\n# ", "\n> ", "\n    | ", "\\n")

pieces = st.one_of(
    st.builds(
        lambda anchor, gap: gap.join(anchor.split()),
        st.sampled_from(ANCHORS),
        st.sampled_from(GAPS),
    ),
    st.builds(lambda anchor, end: anchor[:end], st.sampled_from(ANCHORS), st.integers(0, 30)),
    st.text(" \n#>|*\\nCUDAoutfmemy", max_size=20),
)
texts = st.builds(
    lambda parts, glue: glue.join(parts),
    st.lists(pieces, max_size=8),
    st.sampled_from(["", " ", "\n"]),
)


def both(text: str) -> list[list[int]]:
    return [finder(ANCHORS, plain=plain).ends(text.encode()) for plain in (True, False)]


@needs_the_library
@settings(deadline=None)
@given(texts)
@example("MiB\n    | |")  # the first mark may belong to the gap or be the anchor's last word
def test_both_finders_find_the_same_places(text):
    plain, fast = both(text)

    assert plain == fast


@needs_the_library
def test_the_library_is_used_where_it_is_there():
    assert finder(ANCHORS).name == "hyperscan"
    assert finder(ANCHORS, plain=True).name == "plain"


@pytest.mark.parametrize("plain", [True, False])
def test_every_anchor_is_found_where_it_ends(plain):
    shared = finder(ANCHORS, plain=plain)
    ends = {anchor: len(b"before " + anchor.rstrip().encode()) for anchor in ANCHORS}

    missed = [
        anchor
        for anchor, end in ends.items()
        if end not in shared.ends(f"before {anchor} behind".encode())
    ]

    assert not missed, f"anchors that the finder does not see: {missed}"


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("gap", GAPS)
def test_an_anchor_is_found_over_a_wrapped_or_escaped_line_break(gap, plain):
    text = gap.join(["No", "available", "memory", "for", "the", "cache", "blocks"]).encode()

    assert finder(("No available memory for the cache blocks",), plain=plain).ends(text) == [
        len(text)
    ]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    "text", [b"", b"memory", b"CUDA out of", b"CUDA-out-of-memory", b"CUDAoutofmemory"]
)
def test_parts_of_an_anchor_are_no_anchor(text, plain):
    assert finder(("CUDA out of memory",), plain=plain).ends(text) == []


@pytest.mark.parametrize("plain", [True, False])
def test_ends_come_in_rising_order_and_once(plain):
    ends = finder(("memory", "CUDA out of memory", "out of memory"), plain=plain).ends(
        b"CUDA out of memory; memory"
    )

    assert ends == [18, 26]


@pytest.mark.parametrize("plain", [True, False])
def test_a_view_into_a_buffer_is_searched_like_bytes(plain):
    buffer = bytearray(b"xxCUDA out of memoryxx")

    assert finder(("CUDA out of memory",), plain=plain).ends(memoryview(buffer)[2:]) == [18]


def test_blocks_of_plain_and_of_indented_lines_take_turns():
    shared = finder(("CUDA out of memory",))
    plain, indented = b"a line\nCUDA out\nof memory", b"a line\n  CUDA out\n  of memory"

    assert [
        shared.ends(block) for block in (plain, indented, indented, plain, plain, indented)
    ] == [
        [len(plain)] if block is plain else [len(indented)]
        for block in (plain, indented, indented, plain, plain, indented)
    ]
    assert [shared.holds(block) for block in (indented, plain, b"a line\n  and another")] == [
        True,
        True,
        False,
    ]


def test_anchor_ending_in_a_space_is_found_before_a_line_break():
    assert finder(("cache size: ",), plain=True).ends(b"KV cache size:\n5") == [14]


def test_an_anchor_is_taken_literally():
    assert flexible("a.b (c)") == rb"a\.b" + flexible("x y")[1:-1] + rb"\(c\)"
    assert finder(("a.b(",), plain=True).ends(b"axb( a.b(") == [9]


def test_plain_finder_ends_on_short_repeated_words():
    assert finder(("in fit", "a a a"), plain=True).ends(b"a " * 50)[-1] == 99


def test_one_finder_serves_several_threads():
    shared, block = finder(ANCHORS), b"y" * (1 << 20) + b"CUDA out of memory"
    found: list[list[int]] = []

    def search() -> None:
        found.extend(shared.ends(block) for _ in range(20))

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [[len(block)]] * 80
