"""Which rank failed first: by causes, then by clocks that may be far apart, then by the room that there was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.ranks.barrier import ClockOffset
from oomguard.cluster.ranks.decision import first_cause
from oomguard.cluster.ranks.messages import RankEnd

PATCH = ({"setting": "max_model_len", "to": 1792},)
SAME = ClockOffset(0.0, 0.0)


def out_of_memory(failed_s: float | None = None, room: int | None = None) -> RankEnd:
    facts = {} if room is None else {"kv_cache_available_bytes": room}
    return RankEnd(1, "memory", 1, "exit status 1", {"facts": facts}, PATCH, None, failed_s)


def test_rank_out_of_memory_comes_before_those_that_lost_it():
    ends = {
        0: RankEnd(1, "secondary", 1),
        1: RankEnd(1, "ended", 143),
        2: out_of_memory(9.0),
        3: RankEnd(1, "other", 1),
    }
    assert first_cause(ends, {}).rank == 2


def test_no_rank_is_first_where_none_ran_out_of_memory():
    assert first_cause({0: RankEnd(1, "ran", 0), 1: RankEnd(1, "other", 1)}, {}) is None


@given(
    offsets=st.lists(st.floats(-1e7, 1e7), min_size=3, max_size=3),
    gaps=st.lists(st.floats(3, 1e4), min_size=2, max_size=2),
    order=st.permutations([0, 1, 2]),
)
def test_distant_clocks_with_known_offsets_change_nothing(offsets, gaps, order):
    """A rank's own clock shows its time less its offset; the order on rank 0's clock is what counts."""
    at_s = [100.0, 100.0 + gaps[0], 100.0 + gaps[0] + gaps[1]]
    ends = {rank: out_of_memory(at_s[place] - offsets[rank]) for place, rank in enumerate(order)}
    found = first_cause(ends, {rank: ClockOffset(offsets[rank], 0.1) for rank in order})
    assert (found.rank, found.is_order_known) == (order[0], True)


@given(st.floats(0, 1.9), st.permutations([0, 1]))
def test_fuller_rank_counts_if_clocks_are_too_coarse(gap_s, order):
    fuller, roomier = order
    ends = {fuller: out_of_memory(100.0 + gap_s, room=10), roomier: out_of_memory(100.0, room=20)}
    found = first_cause(ends, {0: SAME, 1: SAME})
    assert (found.rank, found.is_order_known) == (fuller, False)


def test_without_an_offset_no_order_is_claimed():
    found = first_cause({0: out_of_memory(1.0), 1: out_of_memory(1000.0)}, {0: SAME, 1: None})
    assert (found.rank, found.is_order_known) == (0, False)
