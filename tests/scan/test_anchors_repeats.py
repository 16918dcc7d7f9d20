"""A message that is printed again and again: the first ones and the last ones are read, the others are counted."""

from __future__ import annotations

import io
import time

import pytest

from oomguard.rules.rule_files import load_rules
from oomguard.scan.anchors import KEPT, LEAST_RUN, Repeats, finder, skim, without
from oomguard.scan.scan import scan
from oomguard.scan.source import Gap

RULES = load_rules()
FAILURE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}.00 MiB. GPU 0 has a total capacity of 31.36 GiB "
    "of which 12.00 MiB is free.\n"
)


def anchors():
    return finder(RULES.anchors)


def log(count: int) -> bytes:
    lines = (FAILURE.format(10 + number % 89) for number in range(count))
    return (
        "INFO the server is up\n" + "".join(lines) + "INFO bye\n" + FAILURE.format(7777)
    ).encode()


@pytest.mark.parametrize("count", [1000, 20_000, 100_000])
def test_first_and_last_are_read_in_place_and_others_counted(count):
    data = log(count)
    items = list(skim(io.BytesIO(data), anchors))
    lines = [item for item in items if not isinstance(item, Gap)]
    whole = data.decode().splitlines()

    assert len(lines) < 1000
    assert all(whole[line.number - 1] == line.text for line in lines)
    assert [line.number for line in lines[:KEPT]] == list(range(1, KEPT + 1))
    assert lines[-1].number == len(whole)
    assert len(lines) + sum(item.repeats for item in items if isinstance(item, Gap)) == len(whole)


def test_newest_failure_is_named_with_the_number_not_read():
    found = scan(skim(io.BytesIO(log(20_000)), anchors), RULES)

    assert "7777.00 MiB" in found.incidents[-1].evidence[0].text
    assert any("more lines repeat these messages" in note for note in found.notes)


def test_messages_that_differ_in_their_words_are_all_read():
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "it",
        "while",
        "nothing",
        "else",
        "is",
        "going",
        "on",
        "here",
        "today",
        "again",
    ]
    data = "".join(
        f"{one} {other}: CUDA out of memory\n" for one in words for other in words
    ).encode()
    assert Repeats().dropped(data) == []


def test_reading_grows_with_the_length_and_not_with_its_square():
    def seconds(count: int) -> float:
        began = time.thread_time()
        list(skim(io.BytesIO(log(count)), anchors))
        return time.thread_time() - began

    seconds(1000)
    assert seconds(80_000) < 8 * seconds(20_000)


def test_stretches_are_taken_out_of_regions():
    assert without([(0, 10), (20, 30)], [(3, 5), (8, 25)]) == [(0, 3), (5, 8), (25, 30)]
    assert without([(0, 10)], []) == [(0, 10)]
    assert without([(4, 6)], [(0, 10)]) == []


def test_short_runs_are_read():
    assert Repeats().dropped(b"x\n" * (KEPT + LEAST_RUN - 2)) == []
    assert Repeats().dropped(b"x\n" * (KEPT + LEAST_RUN + 2)) != []
