"""The pause before a relaunch, and the budget of any hour; no test waits for a clock."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.analyst.restart_gate import (
    HOUR_S,
    LONGEST_PAUSE_S,
    QUICK_S,
    RateLimit,
    backoff_s,
    quick_failures,
    wait,
)
from oomguard.core.incident import Attempt
from support.each import each


def attempts(*seconds):
    return [Attempt(number, {}, seconds=took_s) for number, took_s in enumerate(seconds, 1)]


def test_the_first_relaunch_waits_for_nothing():
    assert backoff_s(0) == backoff_s(1) == 0.0


@each(("quick", "least_s"), [(2, 1), (3, 2), (4, 4), (5, 8), (6, 16), (7, 32)])
def test_pause_doubles_per_quick_failure_with_a_second_of_jitter(quick, least_s):
    drawn = {backoff_s(quick) for _ in range(50)}
    assert all(least_s <= seconds <= least_s + 1 for seconds in drawn)
    assert len(drawn) > 1


@each("quick", [8, 20, 10_000])
def test_the_pause_is_never_longer_than_its_limit(quick):
    assert backoff_s(quick) == LONGEST_PAUSE_S


@each(
    ("seconds", "quick"),
    [
        ((1,), 1),
        ((1, 2, 3), 3),
        ((1, QUICK_S, 3), 1),
        ((1, 2, QUICK_S), 0),
        ((QUICK_S, QUICK_S - 0.1), 1),
        ((), 0),
    ],
)
def test_attempt_that_served_a_while_ends_the_quick_failures(seconds, quick):
    assert quick_failures(attempts(*seconds)) == quick


def test_a_stop_ends_the_pause_at_once():
    stopped = threading.Event()
    threading.Timer(0.05, stopped.set).start()
    began_s = time.monotonic()
    wait(3600, stopped.is_set)
    assert time.monotonic() - began_s < 60


class Clock:
    def __init__(self):
        self.now_s = 1e6

    def __call__(self):
        return self.now_s


waits = st.lists(
    st.floats(0, 2 * HOUR_S) | st.sampled_from([0.0, 1.0, HOUR_S / 3, HOUR_S]), max_size=40
)


@given(most=st.integers(0, 5), waits=waits)
def test_no_hour_has_more_relaunches_than_its_budget(most, waits):
    clock, begun_s = Clock(), []
    budget = RateLimit(most, clock)
    for wait_s in waits:
        clock.now_s += wait_s
        in_the_hour = [moment for moment in begun_s if clock.now_s < moment + HOUR_S]
        assert budget.used() == len(in_the_hour)
        allowed_in_s = budget.allowed_in_s()
        assert (allowed_in_s == 0.0) == (len(in_the_hour) < most)
        if allowed_in_s == 0.0:
            budget.spend()
            begun_s.append(clock.now_s)
    for first in begun_s:
        assert sum(first <= moment < first + HOUR_S for moment in begun_s) <= most


@given(most=st.integers(1, 5), waits=waits)
def test_stated_time_is_the_earliest_next_begin(most, waits):
    clock = Clock()
    budget = RateLimit(most, clock)
    for wait_s in waits:
        clock.now_s += wait_s
        left_s = budget.allowed_in_s()
        if left_s > 0:
            assert left_s <= HOUR_S + 1e-6
            now_s = clock.now_s
            clock.now_s = now_s + left_s - 0.001
            assert budget.allowed_in_s() > 0
            clock.now_s = now_s + left_s + 0.001
            assert budget.allowed_in_s() == 0.0
        budget.spend()


def test_a_budget_of_none_never_allows_one():
    budget = RateLimit(0, Clock())
    assert budget.allowed_in_s() is None
    assert budget.used() == 0


def test_relaunches_that_are_spread_are_never_refused():
    clock = Clock()
    budget, begun_s = RateLimit(3, clock), []
    for _ in range(50):
        assert budget.allowed_in_s() == 0.0
        budget.spend()
        begun_s.append(clock.now_s)
        clock.now_s += HOUR_S / 3
    assert all(after - before == pytest.approx(HOUR_S / 3) for before, after in pairwise(begun_s))
