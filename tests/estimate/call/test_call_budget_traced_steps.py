"""What a few traced steps say of the rest."""

from __future__ import annotations

from oomguard.estimate.call.call_budget import TracedSteps

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


def test_steps_that_differ_are_not_drawn_on(subtests):
    for name, events in [
        ("another kind of event", (*EVENTS[:-1], (9, 5))),
        ("an end of something old", (*EVENTS[:-2], (1, 0), (7, 0))),
    ]:
        with subtests.test(name):
            traced = TracedSteps(1000, 1000, (1100, 1260, 1280, 1300), events, SEEN)
            assert list(traced.all_events(50)) == list(events)
