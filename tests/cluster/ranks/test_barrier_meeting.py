"""Ranks meet: documents of an earlier job are not believed, offsets of clocks are estimated, who is gone is known."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.ranks.barrier import (
    ClockOffset,
    RankBarrier,
    clock_offset,
    host_identity,
    started_s,
)
from oomguard.cluster.ranks.messages import (
    Decision,
    MessageFolder,
    RankEnd,
    RankMessage,
    parse_message,
)


def met(*meetings: RankBarrier) -> None:
    for _ in range(3):
        for meeting in meetings:
            meeting.look()


def test_ranks_that_write_to_one_folder_meet(tmp_path):
    ranks = [RankBarrier(MessageFolder(tmp_path / "job"), rank, 3) for rank in range(3)]
    met(*ranks)
    assert [meeting.missing() for meeting in ranks] == [set()] * 3
    assert all(set(meeting.look()) == {0, 1, 2} for meeting in ranks)


def test_what_an_earlier_job_left_is_not_believed(tmp_path):
    earlier = [RankBarrier(MessageFolder(tmp_path / "job"), rank, 3) for rank in range(3)]
    met(*earlier)
    earlier[1].update(
        state="ended", end=RankEnd(1, "memory", 1, patches=({"setting": "max_model_len", "to": 1},))
    )
    now = [RankBarrier(MessageFolder(tmp_path / "job"), rank, 3) for rank in (0, 2)]
    met(*now)
    assert [set(meeting.look()) for meeting in now] == [{0, 2}] * 2
    assert [meeting.missing() for meeting in now] == [{1}] * 2


def test_the_last_rank_that_leaves_takes_the_folder_along(tmp_path):
    ranks = [RankBarrier(MessageFolder(tmp_path / "job"), rank, 2) for rank in range(2)]
    met(*ranks)
    for rank in ranks:
        assert (tmp_path / "job").exists()
        rank.leave()
        rank.tidy()
    assert not (tmp_path / "job").exists()


def test_rank_rewrites_what_an_earlier_job_removed(tmp_path):
    meeting = RankBarrier(MessageFolder(tmp_path / "job"), 0, 2)
    meeting.update(state="running")
    MessageFolder(tmp_path / "job").remove()
    meeting.look()
    assert list((tmp_path / "job" / "here").iterdir())


def test_ended_process_is_lost_before_its_status_is_read(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks = [RankBarrier(MessageFolder(tmp_path / "job"), rank, 2) for rank in range(2)]
    ranks[1].update(pid=(child.pid, started_s(child.pid)))
    met(*ranks)
    assert ranks[0].lost() == set()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert ranks[0].lost() == {1}
    child.wait()
    child.stdin.close()
    assert ranks[0].lost() == {1}


def test_two_processes_of_one_host_have_one_clock():
    here = host_identity()
    assert clock_offset(here, here, 1.0, 900.0, 2.0) == ClockOffset(0.0, 0.0)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.floats(0, 10), st.floats(0, 10))
def test_an_estimated_offset_is_no_further_off_than_it_says(offset_s, written_s, there_s, back_s):
    seen_s, read_s = written_s + there_s + offset_s, written_s + there_s + back_s
    found = clock_offset(("a", "a", ""), ("b", "b", ""), written_s, seen_s, read_s)
    assert abs(found.offset_s - offset_s) <= found.slack_s + 1e-6


@given(st.text(max_size=200))
def test_what_is_no_document_is_none(text):
    assert parse_message(text) is None


def test_a_document_is_read_as_it_was_written():
    end = RankEnd(
        1,
        "memory",
        1,
        "exit status 1",
        {"kind": "cuda_oom"},
        ({"setting": "max_model_len", "to": 8},),
        None,
        1.5,
    )
    decision = Decision(
        1,
        True,
        "",
        1,
        False,
        ({"setting": "max_model_len", "to": 8},),
        (),
        {"1": "memory"},
        {"A": "b"},
    )
    document = RankMessage(
        1,
        "n",
        "m",
        {"1": ("n", 2.5)},
        {"1": "n"},
        ("a", "b", "c"),
        (7, 8.0),
        0.5,
        0.25,
        3,
        2,
        "ended",
        end,
        decision,
    )
    assert parse_message(document.to_text()) == document
