"""The trend of the host's memory: which growth is announced, and in which words."""

from __future__ import annotations

import os

from oomguard.analyst.host_trend import Growth, MemorySample, Trend, in_words, own_bytes
from oomguard.supervisor.host_memory import GIB, Level

HOUR_S = 3600
LIMIT = 64 * GIB


def lines_of(part_by_hour, hours: int) -> list[tuple[int, str]]:
    """The lines of one process whose memory follows a function of the hours, every ten minutes."""
    watched = Growth()
    found = []
    for minute in range(0, hours * 60, 10):
        used = round(part_by_hour(minute / 60) * LIMIT)
        sample = MemorySample(Level("limit", LIMIT, LIMIT - used), used, {os.getpid(): used})
        line = watched.line(watched.add(minute * 60, sample))
        if line is not None:
            found.append((minute // 60, line))
    return found


def test_a_leak_is_announced_below_24_hours_and_below_1_hour():
    found = lines_of(lambda hour: 0.2 + 0.02 * hour, 40)
    (first, text), (last, _) = found
    assert 27 <= first <= 34
    assert last == 39
    assert f"pid {os.getpid()} grows by 1.3 GiB/h; the container's 64.0 GiB will be full in" in text


def test_growth_that_ends_is_no_alarm():
    for shape in (
        lambda hour: min(0.9, 0.1 + hour),
        lambda hour: 0.3 + 0.6 * (hour % 2) / 2,
        lambda hour: 0.9 if hour > 12 else 0.2,
        lambda hour: 0.9 - 0.6 * 0.7**hour,
    ):
        assert lines_of(shape, 30) == []


def test_growth_of_others_is_no_alarm():
    watched = Growth()
    for minute in range(0, 38 * 60, 10):
        used = round((0.2 + 0.02 * minute / 60) * LIMIT)
        sample = MemorySample(Level("limit", LIMIT, LIMIT - used), used, {1: GIB})
        assert watched.add(minute * 60, sample) is None


def test_a_clock_that_jumps_back_adds_nothing():
    trend = Trend(LIMIT)
    for at_s in (0, 2000, 1900, 2060):
        trend.add(at_s, 1.0)
    assert [at_s for at_s, _ in trend._samples] == [2000, 2060]


def test_own_memory_and_times_in_words():
    assert own_bytes(os.getpid()) > 1 << 20
    assert own_bytes(2**30) == 0
    assert [in_words(seconds) for seconds in (23000, 7000, 20)] == ["6 h", "117 min", "1 min"]
