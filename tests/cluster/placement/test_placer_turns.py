"""Whose turn it is: first come, first served, and nothing kept for the dead."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.placement.leases import LeaseFolder
from oomguard.cluster.placement.placer import (
    QueuedStart,
    QueueTicket,
    earlier_starts,
    reserve_devices,
)

DEVICES = ("a", "b", "c", "d")
TICKETS = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.sampled_from(DEVICES), unique=True)).map(
        lambda pair: QueuedStart("", pair[0], tuple(pair[1]))
    ),
    max_size=6,
)


@given(TICKETS, st.sets(st.sampled_from(DEVICES)))
def test_only_needed_free_devices_are_kept(waiting, free):
    named = [QueuedStart(str(i), one.count, one.usable) for i, one in enumerate(waiting)]
    kept = reserve_devices(iter(named), free)

    assert set(kept) <= free
    for one in named:
        own = [key for key, name in kept.items() if name == one.name]
        assert len(own) <= one.count
        assert set(own) <= set(one.usable)


@given(TICKETS, st.sets(st.sampled_from(DEVICES)))
def test_who_comes_later_changes_nothing_for_who_came_before(waiting, free):
    named = [QueuedStart(str(i), one.count, one.usable) for i, one in enumerate(waiting)]
    for count in range(len(named)):
        fewer = reserve_devices(iter(named[:count]), free)
        assert {
            key: name
            for key, name in reserve_devices(iter(named), free).items()
            if int(name) < count
        } == fewer


def test_what_is_left_over_by_the_first_is_for_the_next():
    first, second = QueuedStart("1", 1, ("a", "b")), QueuedStart("2", 2, ("a", "b", "c"))
    assert reserve_devices(iter([first, second]), {"a", "b", "c"}) == {"a": "1", "b": "2", "c": "2"}


def test_tickets_are_in_order_of_arrival_and_see_earlier_ones(tmp_path):
    folder = LeaseFolder(tmp_path)
    tickets = [QueueTicket(folder) for _ in range(3)]
    for count, ticket in enumerate(tickets, 1):
        ticket.publish(count, ["a"])

    assert [one.count for one in earlier_starts(folder, None)] == [1, 2, 3]
    assert [one.count for one in earlier_starts(folder, tickets[1])] == [1]
    tickets[0].close()
    assert [one.count for one in earlier_starts(folder, tickets[1])] == []
    for ticket in tickets:
        ticket.close()


def test_the_ticket_of_a_killed_start_is_nobody_s_and_goes(tmp_path):
    code = (
        "import os, signal; from pathlib import Path; from oomguard.cluster.placement.leases import LeaseFolder\n"
        "from oomguard.cluster.placement.placer import QueueTicket\n"
        f"ticket = QueueTicket(LeaseFolder(Path({str(tmp_path)!r}))); ticket.publish(1, ['a']); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert list(tmp_path.glob("turn-*"))

    assert list(earlier_starts(LeaseFolder(tmp_path), None)) == []
    assert not list(tmp_path.glob("turn-*"))


def test_nothing_is_kept_for_one_that_has_stopped_looking(tmp_path, monkeypatch):
    folder = LeaseFolder(tmp_path)
    ticket = QueueTicket(folder)
    ticket.publish(1, ["a"])
    assert len(list(earlier_starts(folder, None))) == 1
    monkeypatch.setattr("oomguard.cluster.placement.placer._SILENT_S", 0.0)
    assert list(earlier_starts(folder, None)) == []
    ticket.close()


def test_a_ticket_that_a_stranger_wrote_is_left_out(tmp_path):
    folder = LeaseFolder(tmp_path)
    ticket = QueueTicket(folder)
    (tmp_path / f"{ticket.name}.lock").write_text('{"count": "many", "usable": 7}')
    assert list(earlier_starts(folder, None)) == []
    ticket.close()
