"""Two stops of one sender within five milliseconds are one."""

from __future__ import annotations

import signal

from oomguard.supervisor.reaper_process import RepeatedSignal
from support.each import each

FIRST = (signal.SIGTERM, 7, 1.0)


@each(
    ("second", "is_one"),
    [
        ((signal.SIGTERM, 7, 1.004), True),
        ((signal.SIGTERM, 7, 1.006), False),
        ((signal.SIGINT, 7, 1.001), False),
        ((signal.SIGTERM, 8, 1.001), False),
    ],
)
def test_repeated_stop_counts_once_per_sender_and_moment(second, is_one):
    twin = RepeatedSignal()
    assert not twin.is_second(*FIRST)
    assert twin.is_second(*second) is is_one


@each("one", [(signal.SIGUSR1, 7, 1.0), (signal.SIGTERM, None, 1.0)])
def test_what_asks_for_no_stop_or_has_no_sender_is_never_one(one):
    twin = RepeatedSignal()
    assert not twin.is_second(*one)
    assert not twin.is_second(*one)
