"""How many rows run next follows from what the parts before them took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.guarding.micro_batch import RowMeasurements


def measured(*parts):
    made = RowMeasurements()
    for rows, taken in parts:
        made.add(rows, 100, 100 + taken)
    return made


def test_before_any_part_nothing_is_known():
    assert RowMeasurements().rows_within(1000) is None
    assert measured().rows_within(1000) is None


def test_after_one_part_rows_take_in_proportion_with_a_margin():
    assert measured((2, 200)).rows_within(1000) == 9
    assert measured((2, 200)).rows_within(1060) == 10


def test_fixed_bytes_of_a_part_are_found_from_two_parts():
    assert measured((2, 120), (4, 140)).rows_within(300) == 20


def test_a_part_is_at_most_eight_times_the_largest_before_it():
    assert measured((2, 20)).rows_within(10_000) == 16


def test_as_many_as_failed_are_not_tried_again():
    made = measured((2, 20), (10, 100))
    made.failed(20)
    assert made.rows_within(1000) is None
    made.add(10, 100, 200)
    assert made.rows_within(1000) == 18


@given(
    st.integers(1, 50),
    st.integers(1, 10**6),
    st.integers(0, 10**7),
    st.integers(0, 10**9),
)
def test_rows_up_to_the_line_fit_and_one_more_does_not(rows, row_bytes, fixed_bytes, room_bytes):
    made = measured(
        (rows, fixed_bytes + rows * row_bytes), (2 * rows, fixed_bytes + 2 * rows * row_bytes)
    )
    found = made.rows_within(room_bytes)
    assert 1 <= found <= 16 * rows
    if found > 1:
        assert fixed_bytes + found * row_bytes <= room_bytes
    if found < 16 * rows:
        assert fixed_bytes + (found + 1) * row_bytes > room_bytes
