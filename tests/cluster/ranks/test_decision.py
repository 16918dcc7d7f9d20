"""All start again, or none: a silent rank, a refusal or an empty plan lets none start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.ranks.decision import decide, ranks_in_words
from oomguard.cluster.ranks.messages import RankEnd

PATCH = ({"setting": "max_model_len", "to": 1792, "reason": ""},)
FAILED = RankEnd(1, "memory", 1, "exit status 1", {}, PATCH)
ENDED = RankEnd(1, "ended", 143)


def test_one_failure_and_all_start_again_with_its_patch():
    decision = decide(1, {0: ENDED, 1: FAILED}, {}, variables={"MASTER_PORT": "1"})
    assert (decision.again, decision.first, decision.patches, decision.variables) == (
        True,
        1,
        PATCH,
        {"MASTER_PORT": "1"},
    )


def test_a_silent_rank_is_named_and_none_starts_again():
    decision = decide(1, {0: ENDED, 1: FAILED}, {}, silent={3, 2})
    assert (decision.again, decision.silent) == (False, (2, 3))
    assert decision.why == "ranks 2 and 3 are silent"


def test_rank_ended_by_a_signal_is_reported_as_that():
    stopped = RankEnd(1, "stopped", 143, "exit status 143, signal 15 (TERM)")
    decision = decide(1, {0: RankEnd(1, "ran", 0), 1: stopped}, {}, silent={2}, gone={1})
    assert (decision.again, decision.silent, decision.gone) == (False, (2,), ())
    assert (
        decision.why
        == "a signal (exit status 143, signal 15 (TERM)) ended rank 1; rank 2 is silent"
    )
    assert not decide(1, {0: FAILED, 1: stopped}, {}).again


def test_one_rank_that_must_not_run_again_holds_all_back():
    decision = decide(
        1, {0: RankEnd(1, "ran", 0, refusal="The command wrote a file"), 1: FAILED}, {}
    )
    assert (decision.again, decision.why) == (False, "rank 0: The command wrote a file")


def test_a_job_that_ran_has_nothing_to_tell():
    decision = decide(2, {0: RankEnd(2, "ran", 0), 1: RankEnd(2, "ran", 0)}, {})
    assert (decision.again, decision.first, decision.why) == (False, None, "")


@given(
    st.dictionaries(
        st.integers(0, 7),
        st.builds(
            RankEnd,
            st.just(1),
            st.sampled_from(["ran", "memory", "secondary", "ended", "stopped", "other"]),
            st.integers(0, 143),
            incident=st.just({}),
            patches=st.sampled_from([(), PATCH]),
            refusal=st.sampled_from([None, "The command wrote a file"]),
            failed_s=st.none() | st.floats(0, 1e6),
        ),
        min_size=1,
    ),
    st.sets(st.integers(8, 9)),
)
def test_ranks_restart_only_if_all_ended_and_one_ran_out(ends, silent):
    decision = decide(1, ends, {}, silent=silent)
    if decision.again:
        assert not silent
        assert all(end.refusal is None for end in ends.values())
        assert ends[decision.first].how == "memory"
        assert decision.patches == PATCH
    else:
        assert decision.variables == {}


def test_ranks_are_listed_as_in_a_sentence():
    assert [ranks_in_words(ranks) for ranks in ([2], [1, 0], {3, 0, 2})] == [
        "rank 2",
        "ranks 0 and 1",
        "ranks 0, 2 and 3",
    ]
