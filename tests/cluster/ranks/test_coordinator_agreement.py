"""All ranks get one decision, in time, whoever is silent; and all start together, or none."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from oomguard.cluster.ranks.barrier import RankBarrier
from oomguard.cluster.ranks.coordinator import (
    AgreementRound,
    RankMonitor,
    start_together,
    stopped_end,
)
from oomguard.cluster.ranks.messages import Decision, MessageFolder, RankEnd
from support.each import each

PATCH = ({"setting": "max_model_len", "to": 1792, "reason": ""},)
FAILED = RankEnd(1, "memory", 1, "exit status 1", {}, PATCH)
LOST_OTHERS = RankEnd(1, "secondary", 1)
RAN = RankEnd(1, "ran", 0)


def met(folder: Path, size: int) -> list[RankBarrier]:
    ranks = [RankBarrier(MessageFolder(folder / "job"), rank, size) for rank in range(size)]
    for _ in range(3):
        for meeting in ranks:
            meeting.look()
    return ranks


def decisions(
    ranks: list[RankBarrier], ends: dict[int, RankEnd], timeout_s: float = 20.0
) -> dict[int, Decision | None]:
    def decided(rank: int) -> Decision | None:
        return AgreementRound(
            ranks[rank], ends[rank], timeout_s, lambda: False, lambda: {"MASTER_PORT": "1"}
        ).decision()

    with ThreadPoolExecutor(len(ends)) as pool:
        return dict(zip(ends, pool.map(decided, ends), strict=True))


def test_every_rank_gets_the_decision_of_rank_0(tmp_path):
    found = decisions(met(tmp_path, 4), {0: LOST_OTHERS, 1: LOST_OTHERS, 2: FAILED, 3: RAN})
    assert len({decision.first for decision in found.values()}) == 1
    assert all(
        decision.again and decision.first == 2 and decision.patches == PATCH
        for decision in found.values()
    )
    assert {decision.variables["MASTER_PORT"] for decision in found.values()} == {"1"}


def test_a_rank_that_says_nothing_is_named_when_the_time_is_over(tmp_path):
    began_s = time.monotonic()
    found = decisions(met(tmp_path, 3), {0: LOST_OTHERS, 1: FAILED}, timeout_s=2.0)
    assert [(decision.again, decision.silent) for decision in found.values()] == [(False, (2,))] * 2
    assert time.monotonic() - began_s < 20


def test_where_rank_0_says_nothing_each_rank_ends_by_itself(tmp_path):
    found = decisions(met(tmp_path, 3), {1: FAILED, 2: LOST_OTHERS}, timeout_s=2.0)
    assert [(decision.again, decision.silent) for decision in found.values()] == [(False, (0,))] * 2


def test_a_job_that_ran_ends_without_a_word(tmp_path):
    found = decisions(met(tmp_path, 3), {0: RAN, 1: RAN, 2: RAN})
    assert [(decision.again, decision.why) for decision in found.values()] == [(False, "")] * 3


def test_a_stop_ends_the_wait(tmp_path):
    ranks = met(tmp_path, 2)
    assert AgreementRound(ranks[1], FAILED, 20.0, lambda: True, dict).decision() is None


@each("able", [[True, True, True], [True, False, True]])
def test_all_start_together_or_none(tmp_path, able):
    ranks = met(tmp_path, 3)

    def start(rank: int) -> str | None:
        return start_together(ranks[rank], 2, 20.0, lambda: False, is_able=able[rank])

    with ThreadPoolExecutor(3) as pool:
        assert [why is None for why in pool.map(start, range(3))] == [all(able)] * 3


def test_rank_that_leaves_silently_is_not_waited_for(tmp_path):
    ranks = met(tmp_path, 2)
    ranks[1].leave()
    began_s = time.monotonic()
    found = decisions(ranks, {0: FAILED}, timeout_s=100.0)
    assert (found[0].again, found[0].silent) == (False, (1,))
    assert time.monotonic() - began_s < 50


def test_a_rank_that_does_not_get_ready_is_named(tmp_path):
    why = start_together(met(tmp_path, 2)[0], 2, 0.5, lambda: False, is_able=True)
    assert why == "rank 1 was not ready within 0.5 s"


def test_rank_that_cannot_start_jointly_left_before_the_attempt(tmp_path):
    """The others may have seen it ready, and started: they end what they started."""
    ranks = met(tmp_path, 2)
    start_together(ranks[0], 2, 0.5, lambda: False, is_able=True)
    ended = threading.Event()
    ranks[1].update(number=2, state="running")
    watch = RankMonitor(lambda: ranks[1], 2, lambda _over: ended.set())
    assert ended.wait(20)
    assert watch.stop().why == "ended because rank 0 did not restart"


def test_a_rank_that_was_stopped_ends_no_other(tmp_path):
    """The launcher stopped it, and knows what the others are to do."""
    ranks = met(tmp_path, 2)
    ranks[0].update(number=1, state="running")
    ranks[0].leave()
    watch = RankMonitor(lambda: ranks[1], 1, lambda _over: None)
    time.sleep(1.5)
    assert watch.stop() is None


def test_a_stopped_rank_without_time_to_leave_is_not_called_killed(tmp_path):
    """After a stop, its process may be killed as soon as it has reported the signal."""
    ranks = met(tmp_path, 2)
    ranks[0].update(number=1, state="ended", end=stopped_end(1, 143), pid=(1 << 22, 1.0))
    ranks[1].look()
    assert ranks[1].lost() == {0}
    watch = RankMonitor(lambda: ranks[1], 1, lambda _over: None)
    time.sleep(1.5)
    assert watch.stop() is None


def test_rank_that_can_no_longer_write_is_not_taken_for_killed(tmp_path):
    ranks = met(tmp_path, 2)
    ranks[1].update(pid=(1 << 22, 1.0))
    ranks[0].look()
    assert ranks[0].lost() == {1}
    ranks[1].withdraw()
    ranks[0].look()
    assert ranks[0].lost() == set()
