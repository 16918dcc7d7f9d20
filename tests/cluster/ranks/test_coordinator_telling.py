"""What is told of a decision: the plan of all ranks, and who is gone."""

from __future__ import annotations

from oomguard.cluster.ranks.coordinator import plan_of_all
from oomguard.cluster.ranks.decision import absent_in_words
from oomguard.cluster.ranks.messages import Decision
from oomguard.core.incident import Effect, Patch


def patch(setting: str, to: object, group: int | None = None) -> dict[str, object]:
    return {
        "setting": setting,
        "from": None,
        "to": to,
        "effect": "reduces-capacity",
        "reason": "",
        "group": group,
    }


OWN = (
    Patch("max_model_len", 32768, 4096, Effect.REDUCES_CAPACITY, ""),
    Patch("gpu_memory_utilization", 0.9, None, Effect.OUTPUT_PRESERVING, "", group=3),
)


def test_the_plan_that_is_shown_has_the_value_of_all():
    planned = plan_of_all(OWN, Decision(1, True, patches=(patch("max_model_len", 1792),)))
    assert [(each.setting, each.new) for each in planned] == [
        ("max_model_len", 1792),
        ("gpu_memory_utilization", None),
    ]


def test_what_another_rank_needs_beside_it_belongs_to_it():
    both = (patch("max_model_len", 1792, 3), patch("enforce_eager", True))
    planned = plan_of_all(OWN, Decision(1, True, patches=both))
    assert [each.setting for each in planned] == [
        "max_model_len",
        "enforce_eager",
        "gpu_memory_utilization",
    ]
    assert planned[0].group == planned[1].group != planned[2].group


def test_without_a_plan_of_all_that_of_the_first_stays():
    assert plan_of_all(OWN, Decision(1, False)) == OWN


def test_killed_rank_is_distinguished_from_a_silent_one():
    decision = Decision(1, False, silent=(1, 2, 3), gone=(1,))
    assert absent_in_words(decision) == "rank 1 was killed; ranks 2 and 3 are silent"
