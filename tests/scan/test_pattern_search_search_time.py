"""Processor time of searches: each has a limit, and beyond a free part all of one input share another."""

from __future__ import annotations

import time

import pytest
import regex

from oomguard.rules.signature import LazyPattern
from oomguard.scan import pattern_search
from oomguard.scan.pattern_search import SearchTime

ENDLESS = regex.compile("(?:a|a|aa)+b")
TEXT = "a" * 4000


def test_quick_searches_take_nothing_of_the_shared_time():
    limit = SearchTime()
    for _ in range(2000):
        limit.search(regex.compile("a"), TEXT)
        limit.first_behind(regex.compile("a"), TEXT, 10)

    # Not zero: a collection of garbage may fall into a search.
    assert limit._beyond_s < pattern_search.SHARED_S / 4
    assert limit.notes == ()


def test_slow_search_gets_the_rest_of_the_shared_time(
    monkeypatch,
):
    monkeypatch.setattr(pattern_search, "SHARED_S", 0.2)
    limit = SearchTime()
    while not limit.notes:
        with pytest.raises(TimeoutError):
            limit.search(ENDLESS, TEXT)
    began = time.thread_time()
    with pytest.raises(TimeoutError):
        limit.search(ENDLESS, TEXT)

    assert time.thread_time() - began < 0.4
    assert limit.search(regex.compile("a+"), TEXT).end() == 4000
    assert limit.notes == (
        "slow patterns took 0.2 s in total; after that oomguard skipped each search after 20 ms",
    )


def test_compiling_a_pattern_on_first_use_is_no_search(monkeypatch):
    monkeypatch.setattr(pattern_search, "FREE_S", 1e-4)
    taken_s = []
    for tried in range(5):  # a collection of garbage may fall into one of the searches
        words = "|".join(f"word{n}x{tried}" for n in range(300))
        limit = SearchTime()
        limit.search(LazyPattern(f"(?:{words})", path="x.toml", key="pattern"), "nothing")
        taken_s.append(limit._beyond_s)

    assert min(taken_s) < 1e-3


def test_the_first_match_behind_a_position_counts():
    found = SearchTime().first_behind(regex.compile("a."), "a1 a2 a3", 3)

    assert found.group() == "a2"
