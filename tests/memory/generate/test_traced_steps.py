"""What a few traced steps say of the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomguard.memory.generate.traced_steps import TracedSteps, between

# A prefill with weights (1) and a cache (2), then steps that each make a larger cache, a scratch, and end both predecessors.
EVENTS = (
    (1, 1000),
    (2, 100),
    (3, 50),
    (4, 110),
    (2, 0),
    (3, 0),
    (5, 50),
    (6, 120),
    (4, 0),
    (5, 0),
    (7, 50),
    (8, 130),
    (6, 0),
    (7, 0),
)
SEEN = (2, 6, 10, 14)


def live(events):
    sizes = dict(events)
    return sorted(size for size in sizes.values() if size)


def test_later_steps_do_what_the_last_did_with_sizes_that_go_on():
    traced = TracedSteps(1000, 1000, (1100, 1260, 1280, 1300), EVENTS, SEEN)
    assert list(traced.all_events(6))[14:] == [
        (9, 50),
        (10, 140),
        (8, 0),
        (9, 0),
        (11, 50),
        (12, 150),
        (10, 0),
        (11, 0),
    ]
    assert live(traced.all_events(40)) == [130 + 36 * 10, 1000]


def test_of_thousands_of_steps_some_stand_for_several():
    traced = TracedSteps(1000, 1000, (1100, 1260, 1280, 1300), EVENTS, SEEN)
    assert live(traced.all_events(4004)) == [1000, 130 + 4000 * 10]
    assert len(list(traced.all_events(4004))) < 2000


def test_what_outlives_two_steps_ends_in_those_that_are_drawn_on_too():
    steps = [[(n + 1, 100 + n), (n - 1, 0)] for n in range(1, 6)]  # each ends what was made two steps before
    events = ((1, 1000), *(event for step in steps for event in step))
    traced = TracedSteps(0, 0, (0,) * 5, events, (3, 5, 7, 9, 11))

    assert list(traced.all_events(7))[11:] == [(7, 106), (5, 0), (8, 107), (6, 0)]


def test_of_many_events_a_step_fewer_steps_stand_for_the_rest():
    step = [[(10_000 * n + at, 512) for at in range(1, 3000)] for n in range(4)]
    ends = [[(number, 0) for number, _ in made] for made in step]
    events = tuple(event for made, ended in zip(step, ends, strict=True) for event in (*made, *ended))
    seen = tuple(5998 * n for n in range(1, 5))

    assert len(list(TracedSteps(0, 0, (0,) * 4, events, seen).all_events(500))) == (4 + 16) * 5998


@pytest.mark.parametrize(
    "events",
    [(*EVENTS[:-1], (9, 5)), (*EVENTS[:-2], (1, 0), (7, 0))],
    ids=["another kind of event", "an end of something old"],
)
def test_steps_that_differ_are_not_drawn_on(events):
    traced = TracedSteps(1000, 1000, (1100, 1260, 1280, 1300), events, SEEN)
    assert list(traced.all_events(50)) == list(events)


def test_the_last_step_is_the_end_s_where_that_was_traced():
    on_a_line = TracedSteps(10, 20, (100, 60, 70, 80))
    assert on_a_line.peak_bytes(4) == 100
    assert on_a_line.peak_bytes(14) == 180
    assert TracedSteps(10, 20, (100, 60, 70, 80), end_bytes=140).peak_bytes(14) == 140
    assert TracedSteps(10, 20, (100,)).peak_bytes(1) == 100


def with_rows(rows):
    """A call whose cache and scratch follow its rows; the weights do not."""
    events = tuple((number, size if number == 1 else size * rows) for number, size in EVENTS)
    return TracedSteps(1000, 1000 + rows, tuple(1000 + rows * n for n in (100, 260, 280, 300)), events, SEEN)


def test_between_two_numbers_of_rows_a_call_does_what_it_does_with_that_number():
    assert between(with_rows(2), with_rows(10), 5 / 8) == with_rows(7)
    assert between(with_rows(2), with_rows(10), 2) == with_rows(18)


def test_of_calls_that_do_not_do_the_same_nothing_is_told_between_them():
    other = with_rows(10)
    assert between(with_rows(2), replace(other, events=other.events[:-1]), 0.5) is None
    assert between(with_rows(2), replace(other, events=((9, 1), *other.events[1:])), 0.5) is None


def test_weights_and_inputs_are_there_before_a_call_takes_anything():
    traced = replace(with_rows(2), events_before=1)

    assert list(traced.own_events(4)) == list(traced.all_events(4))[1:]
