"""The largest number of rows is found in a few questions, whatever line the need follows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from oomguard.memory.generate.rows import RowsThatRan, largest_rows, most_rows


@given(st.integers(0, 10**9), st.integers(1, 10**8), st.integers(2, 500), st.integers(1, 10**11))
def test_on_a_line_it_is_the_largest_that_fits(fixed, row, rows, room):
    asked = []

    def need(number):
        asked.append(number)
        return fixed + row * number

    found = largest_rows(need, room, rows)
    fitting = [n for n in range(1, rows) if fixed + row * n <= room]
    assert found[0] == (fitting[-1] if fitting else 0)
    assert found[1] == fixed + row * max(1, found[0])
    assert len(asked) <= 6


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=400), st.integers(1, 10**8))
def test_on_any_rising_need_what_is_found_fits_and_no_number_is_asked_twice(rises, room):
    needs = [sum(rises[: n + 1]) for n in range(len(rises))]
    asked = []

    def need(number):
        asked.append(number)
        return needs[number - 1]

    found = largest_rows(need, room, len(needs) + 1)
    assert found[0] == 0 or needs[found[0] - 1] <= room
    assert len(set(asked)) == len(asked) or len(needs) == 1
    assert len(asked) <= 12


def test_one_row_cannot_be_split():
    assert largest_rows(lambda n: n, 10, 1) is None


def test_where_the_need_cannot_be_told_nothing_is_said():
    assert largest_rows(lambda n: None if n == 7 else n, 10, 8) is None


def segments_of(number):
    """As an allocator takes them: 32 to 34 rows leave larger pieces unused than 35 to 37."""
    return number * 10 + (150 if number in (32, 33, 34) or number > 37 else 0)


def test_where_fewer_rows_do_not_fit_more_may_and_they_are_found_in_a_few_traces():
    asked = []

    def need(number):
        asked.append(number)
        return segments_of(number)

    assert most_rows(need, lambda number: segments_of(number) if len(asked) > 1 else None, 400, 49) == (37, 370)
    assert len(asked) <= 3


def test_an_estimate_that_a_trace_does_not_bear_out_is_left():
    assert most_rows(lambda number: number * 10, lambda number: number * 5, 100, 49) == (10, 100)
    assert most_rows(lambda number: number * 10, lambda _: None, 100, 49) == (10, 100)
    assert most_rows(lambda number: number * 1000, lambda _: None, 100, 49) == (0, 1000)


def test_one_part_is_taken_in_proportion_two_as_a_line():
    ran = RowsThatRan()
    ran.add(4, 400 + 4 * 100)
    assert ran.rows_within(2000) == 10
    ran.add(10, 400 + 10 * 100)
    assert ran.rows_within(2000) == 16


def test_of_parts_of_one_size_the_heaviest_counts():
    ran = RowsThatRan()
    ran.add(4, 400)
    ran.add(4, 800)
    ran.add(4, 600)
    assert ran.rows_within(1600) == 8


def test_one_row_is_always_left(subtests):
    for room in [-5, 0, 3]:
        with subtests.test(room=room):
            ran = RowsThatRan()
            ran.add(2, 1000)
            assert ran.rows_within(room) == 1


def test_after_a_failure_nothing_grows_so_far_again():
    ran = RowsThatRan()
    ran.add(1, 100)
    assert ran.rows_within(10_000) == 8  # at most eight times what ran: rows to come may be heavier
    ran.failed(8)
    ran.add(2, 400)
    assert ran.rows_within(10_000) == 7


def test_a_need_that_stays_one_byte_too_much_is_halved_and_not_walked_down():
    rows, need = largest_rows(lambda number: number if number <= 40 else 101, 100, 64)
    assert 30 <= rows <= 40
    assert need == rows
