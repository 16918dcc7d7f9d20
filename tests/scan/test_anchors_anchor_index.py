"""Which literals a line holds, as asking for each of them tells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.scan.anchors import AnchorIndex

LETTERS = st.text(alphabet="ab -", max_size=30)


@given(st.lists(LETTERS.filter(bool), max_size=12), LETTERS)
def test_it_finds_what_asking_for_each_finds(literals, text):
    assert sorted(AnchorIndex(tuple(literals)).inside(text)) == sorted(
        {one for one in literals if one in text}
    )


def test_a_literal_of_two_characters_is_found():
    assert AnchorIndex(("tp", "out of memory")).inside("it ran out of memory, tp 8") == [
        "tp",
        "out of memory",
    ]
