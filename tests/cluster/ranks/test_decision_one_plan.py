"""One plan: what the first cause calls for, with values that every rank which ran out can live with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.cluster.ranks.decision import merge_plans
from oomguard.cluster.ranks.messages import RankEnd


def end(*patches: tuple[str, object], how: str = "memory") -> RankEnd:
    return RankEnd(
        1,
        how,
        1,
        "",
        {},
        tuple({"setting": name, "to": value, "reason": ""} for name, value in patches),
    )


def values(*ends: RankEnd, first: int = 0) -> dict[str, object]:
    return {patch["setting"]: patch["to"] for patch in merge_plans(first, dict(enumerate(ends)))}


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.data())
def test_the_fullest_rank_decides_whichever_failed_first(lengths, data):
    first = data.draw(st.integers(0, len(lengths) - 1))
    assert values(*(end(("max_model_len", length)) for length in lengths), first=first) == {
        "max_model_len": min(lengths)
    }


def test_what_another_rank_needs_beside_it_is_changed_on_all():
    assert values(end(("max_model_len", 1792)), end(("enforce_eager", True))) == {
        "max_model_len": 1792,
        "enforce_eager": True,
    }


def test_of_two_texts_that_of_the_first_cause_counts():
    assert values(end(("kv_cache_dtype", "fp8")), end(("kv_cache_dtype", "auto"))) == {
        "kv_cache_dtype": "fp8"
    }


def test_without_a_patch_for_the_first_cause_nothing_is_planned():
    assert merge_plans(0, {0: end(), 1: end(("max_model_len", 8))}) == ()


def test_a_setting_that_is_not_known_here_is_left_out():
    assert values(end(("no_such_setting", 1), ("max_model_len", 8))) == {"max_model_len": 8}


def test_ranks_that_only_lost_the_others_plan_nothing():
    assert values(end(("max_model_len", 8)), end(("max_model_len", 4), how="secondary")) == {
        "max_model_len": 8
    }
