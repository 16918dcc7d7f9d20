"""Exit statuses in words."""

from __future__ import annotations

from oomguard.core.process import status_in_words
from support.each import each


@each(
    ("status", "words"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (128, "exit status 128"),
        (137, "exit status 137, signal 9 (KILL)"),
        (143, "exit status 143, signal 15 (TERM)"),
        (255, "exit status 255"),
    ],
)
def test_above_128_the_signal_is_named_where_there_is_one(status, words):
    assert status_in_words(status) == words
