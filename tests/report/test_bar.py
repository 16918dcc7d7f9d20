"""Shares of the device: they add up, the rest is named, every part is seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.facts import GIB
from oomguard.core.incident import Budget, BudgetPart
from oomguard.report.bar import REST, cells, percent, segments

PARTS = st.lists(st.integers(1, 2**40), min_size=1, max_size=12)


def budget(total: int | None, *sizes: int) -> Budget:
    return Budget(total, tuple(BudgetPart(f"part {i}", size) for i, size in enumerate(sizes)))


@given(PARTS, st.one_of(st.none(), st.integers(1, 2**41)))
def test_the_shares_add_up_to_one_but_for_the_rounding(sizes, total):
    assert 0.99 <= sum(part.ratio for part in segments(budget(total, *sizes))) <= 1.0001


@given(PARTS, st.integers(1, 100))
def test_the_cells_add_up_to_the_width(sizes, width):
    assert sum(cells(segments(budget(None, *sizes)), width)) == width


@given(PARTS, st.integers(13, 100))
def test_every_part_has_a_cell_where_there_is_room(sizes, width):
    assert min(cells(segments(budget(None, *sizes)), width)) >= 1


def test_what_no_part_names_is_the_rest():
    *_, rest = segments(budget(10 * GIB, 6 * GIB))

    assert (rest.name, rest.bytes, rest.ratio) == (REST, 4 * GIB, 0.4)


def test_a_rest_within_the_rounding_is_not_named():
    assert len(segments(budget(1000 * GIB, 995 * GIB))) == 1


def test_parts_beyond_the_device_are_shares_of_their_sum():
    assert [part.ratio for part in segments(budget(GIB, 3 * GIB, GIB))] == [0.75, 0.25]


def test_without_parts_there_is_no_bar():
    assert segments(Budget(24 * GIB)) == ()


def test_a_share_is_written_short():
    for ratio, text in [
        (0.64, "64%"),
        (0.0591, "5.9%"),
        (0.0001, "<0.1%"),
        (0, "0.0%"),
        (1, "100%"),
    ]:
        assert percent(ratio) == text, (ratio, text)
