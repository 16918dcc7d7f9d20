"""A crash loop is recognised by what was printed, and ends a run only where a change is known not to have helped."""

from __future__ import annotations

from oomguard.analyst.restart_gate import QUICK_S, CrashLoop, need_shrank
from oomguard.core.facts import Fact
from oomguard.core.incident import Attempt, Cause, Effect, Incident, Patch
from support.each import each

GIB = 2**30
SAME = {"tried_bytes": 4 * GIB, "device_free_bytes": GIB // 2}


def incident(kind="cuda_oom", rule="OG316", phase="decode", **figures):
    facts = {name: Fact(name, value, "printed") for name, value in figures.items()}
    cause = Cause("utilization_too_high", rule, 0.8, (), "why")
    return Incident(kind, "out of memory", phase=phase, facts=facts, causes=(cause,))


def patch(name="gpu_memory_utilization", new=0.8, **predicts):
    return Patch(name, 0.9, new, Effect.REDUCES_CAPACITY, "it fits", predicts=predicts)


def looped(*failures, took_effect=True, seconds=10.0):
    """The loop after these failures; each but the first is (incident, changed settings)."""
    loop, began_s = CrashLoop(), 100.0
    for number, (failed, names) in enumerate(failures, 1):
        patches = tuple(patch(name) for name in names)
        attempt = Attempt(number, {}, patches, failed, 1, "exit status 1", seconds)
        loop.add(attempt, began_s, took_effect=took_effect or number == 1)
        began_s += seconds + 5.5
    return loop


U, S = ("gpu_memory_utilization",), ("max_num_seqs",)


def test_three_equal_failed_starts_are_a_loop_with_times():
    loop = looped((incident(**SAME), ()), (incident(**SAME), U), (incident(**SAME), U))
    assert loop.description == "3 starts in 41 s, each failed with cuda_oom (OG316, decode)"
    assert loop.times == "10 s, 10 s, 10 s"


def test_two_starts_are_none():
    assert looped((incident(**SAME), ()), (incident(**SAME), U)).description is None


@each("other", [{"kind": "hip_oom"}, {"rule": "OG317"}, {"phase": "prefill"}])
def test_another_kind_rule_or_phase_in_between_ends_the_loop(other):
    assert (
        looped(
            (incident(**SAME), ()), (incident(**other, **SAME), U), (incident(**SAME), U)
        ).description
        is None
    )


def test_an_attempt_that_ran_for_long_ends_the_loop():
    failures = [(incident(**SAME), ()), (incident(**SAME), U), (incident(**SAME), U)]
    assert looped(*failures, seconds=QUICK_S).description is None


def test_a_change_that_did_not_reach_the_engine_is_no_part_of_it():
    failures = [(incident(**SAME), ()), (incident(**SAME), U), (incident(**SAME), U)]
    assert looped(*failures, took_effect=False).description is None


def test_another_step_of_a_change_that_did_not_help_ends_the_run():
    loop = looped((incident(**SAME), ()), (incident(**SAME), U), (incident(**SAME), U))
    assert loop.is_another_step([patch(new=0.7)])


def test_another_setting_may_be_tried():
    loop = looped((incident(**SAME), ()), (incident(**SAME), U), (incident(**SAME), U))
    assert not loop.is_another_step([patch("max_num_seqs", 16)])
    assert not loop.is_another_step([patch(new=0.7), patch("max_num_seqs", 16)])


def test_two_changes_in_turn_of_which_none_helped_end_the_run():
    loop = looped((incident(**SAME), ()), (incident(**SAME), U), (incident(**SAME), S))
    assert loop.is_another_step([patch(new=0.7)])


def test_a_value_solved_to_a_predicted_figure_may_be_tried():
    loop = looped((incident(**SAME), ()), (incident(**SAME), U), (incident(**SAME), U))
    assert not loop.is_another_step([patch(new=0.7, kv_cache_available_bytes=GIB)])


def test_a_change_that_helped_may_go_on():
    better = {**SAME, "device_free_bytes": 2 * GIB}
    loop = looped((incident(**SAME), ()), (incident(**SAME), U), (incident(**better), U))
    assert loop.description is not None
    assert not loop.is_another_step([patch(new=0.7)])


def test_the_last_step_of_a_setting_decides():
    better = {**SAME, "device_free_bytes": 2 * GIB}
    assert looped(
        (incident(**SAME), ()), (incident(**better), U), (incident(**better), U)
    ).is_another_step([patch()])


def test_where_no_figure_is_printed_nothing_is_concluded():
    loop = looped((incident(), ()), (incident(), U), (incident(), U))
    assert loop.description is not None
    assert not loop.is_another_step([patch(new=0.7)])


@each(
    ("before", "after", "shrank"),
    [
        ({"tried_bytes": 4 * GIB}, {"tried_bytes": 3 * GIB}, True),
        ({"tried_bytes": 4 * GIB}, {"tried_bytes": 4 * GIB - 1}, False),
        ({"tried_bytes": 4 * GIB}, {"tried_bytes": 5 * GIB}, False),
        (
            {"tried_bytes": 4 * GIB, "device_free_bytes": GIB},
            {"tried_bytes": 4 * GIB, "device_free_bytes": 2 * GIB},
            True,
        ),
        (
            {"tried_bytes": 4 * GIB, "device_free_bytes": GIB},
            {"tried_bytes": 4 * GIB, "device_free_bytes": GIB // 2},
            False,
        ),
        ({"tried_bytes": 4 * GIB}, {"device_free_bytes": GIB}, None),
        ({"device_free_bytes": GIB}, {"device_free_bytes": 2 * GIB}, None),
        ({"kv_cache_available_bytes": -GIB}, {"kv_cache_available_bytes": -GIB // 2}, True),
        ({"kv_cache_available_bytes": -GIB}, {"kv_cache_available_bytes": -GIB}, False),
        (
            {"kv_cache_available_bytes": -GIB},
            {"kv_cache_available_bytes": 0, "kv_cache_needed_bytes": GIB},
            None,
        ),
        (
            {"desired_bytes": 9 * GIB, "device_free_bytes": GIB},
            {"desired_bytes": 8 * GIB, "device_free_bytes": GIB},
            True,
        ),
        ({}, {}, None),
    ],
)
def test_need_shrank_only_beyond_the_usual_variation(before, after, shrank):
    assert need_shrank(incident(**before), incident(**after)) is shrank


def test_a_figure_within_its_rounding_has_not_shrunk():
    def printed(size_bytes):
        fact = Fact("kv_cache_needed_bytes", size_bytes, "printed", slack=GIB // 200)
        return Incident("kv_cache_too_small_for_max_len", "", facts={fact.name: fact})

    assert need_shrank(printed(GIB // 50), printed(GIB // 50 - GIB // 300)) is False
