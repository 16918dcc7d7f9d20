"""From causes to a plan: what may be done first, nothing twice, what is not known said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import OomguardError
from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Cause, Effect, Incident, Patch, SettingInForce
from oomguard.diagnosis import assess, default_rules
from oomguard.remedy.planner import next_patches, plan
from oomguard.remedy.policy import Policy
from oomguard.rules.rule_files import Confidence, Fix, Rule, RuleSet
from oomguard.rules.syntax import compile_expression

TOO_LONG = {
    "max_model_len_tokens": 131072,
    "kv_cache_needed_bytes": 16 * GIB,
    "kv_cache_available_bytes": 15 * GIB,
    "estimated_max_model_len_tokens": 122880,
    "device_total_bytes": 80 * GIB,
    "gpu_memory_utilization_ratio": 0.80,
    "kv_cache_memory_bytes_set": False,
    "num_gpu_blocks_override_set": False,
}


def incident(
    kind="kv_cache_too_small_for_max_len", *, user: dict | None = None, complete=True, **facts
) -> Incident:
    return Incident(
        kind,
        "boom",
        facts={
            name: fact if isinstance(fact, Fact) else Fact(name, fact)
            for name, fact in facts.items()
        },
        settings={
            name: SettingInForce(name, value, True, "command")
            for name, value in (user or {}).items()
        },
        settings_complete=complete,
    )


def fix(
    setting: str,
    *,
    effect=Effect.OUTPUT_PRESERVING,
    solve=None,
    value=None,
    when=(),
    alternative=False,
    lever="",
    missing="",
):
    def condition(source):
        return compile_expression(source, path="r", key="k", result=None)

    return Fix(
        setting,
        effect,
        solve,
        condition(value) if value else None,
        tuple(condition(text) for text in when),
        "its cost",
        alternative,
        lever,
        missing,
    )


RULE = Rule(
    path="r",
    code="XX101",
    cause="lora",
    title="a title",
    since="0",
    status="stable",
    kinds=("cuda_oom",),
    when=(),
    unknown=(),
    confidence=(Confidence(0.5, 0.0, None),),
    summary="s",
    why="w",
    confirm="c",
    fixes=(),
    references=(),
    tests=(),
)


def planned(
    *fixes: Fix, policy: Policy | None = None, tried=(), base: Incident | None = None
) -> Incident:
    """The plan of one made-up rule with these fixes."""
    rule = RULE._replace(fixes=fixes)
    base = base or incident("cuda_oom")
    return plan(
        replace(base, causes=(Cause("lora", "XX101", 0.5, (), "s"),)),
        RuleSet((), (rule,)),
        policy or Policy(),
        tried,
    )


def assessed(base: Incident, policy: Policy | None = None, tried=()) -> Incident:
    return assess(base, default_rules(), policy or Policy(), tried)


def next_patch(result: Incident) -> Patch | None:
    return next(iter(next_patches(result, lambda _name: True)), None)


def names(result: Incident) -> list[str]:
    return [patch.setting for patch in result.plan]


def test_a_patch_says_all_a_person_needs():
    (patch,) = planned(
        fix("max_model_len", value="4096.0"), base=incident("cuda_oom", max_model_len_tokens=8192)
    ).plan

    assert (patch.setting, patch.old, patch.new, patch.effect) == (
        "max_model_len",
        8192,
        4096,
        Effect.REDUCES_CAPACITY,
    )
    assert (patch.as_flag, patch.as_kwarg, patch.as_env) == (
        "--max-model-len 4096",
        "max_model_len=4096",
        None,
    )
    assert (patch.rule, patch.reason, patch.tradeoff) == ("XX101", "a title", "its cost")
    assert patch.applicable


def test_allowed_actions_come_before_blocked_and_unsolved():
    result = planned(
        fix("batch_size", lever="shrinks it", missing="rows: not printed"),
        fix("quantization", effect=Effect.CHANGES_OUTPUTS, value="'awq'"),
        fix("max_num_seqs", effect=Effect.REDUCES_CAPACITY, value="8.0"),
        fix("enforce_eager", value="True"),
    )

    assert names(result) == ["enforce_eager", "max_num_seqs", "quantization", "batch_size"]


def test_the_effect_is_that_of_the_direction_and_not_of_the_rule():
    (patch,) = planned(
        fix("gpu_memory_utilization", value="0.5"),
        base=incident("cuda_oom", gpu_memory_utilization_ratio=0.9),
    ).plan

    assert patch.effect == Effect.REDUCES_CAPACITY


def test_the_setting_in_force_wins_over_the_fact_and_the_default():
    base = incident(
        "cuda_oom", user={"gpu_memory_utilization": 0.7}, gpu_memory_utilization_ratio=0.9
    )

    assert planned(fix("gpu_memory_utilization", value="0.95"), base=base).plan[0].old == 0.7


def test_version_default_is_the_old_value_if_nothing_is_known():
    base = replace(incident("cuda_oom"), framework="vllm", framework_version="0.32.0")

    assert planned(fix("gpu_memory_utilization", value="0.95"), base=base).plan[0].old == 0.92


def test_the_first_cause_s_fix_for_a_setting_is_the_one_planned():
    assert [
        patch.new
        for patch in planned(fix("batch_size", value="4.0"), fix("batch_size", value="2.0")).plan
    ] == [4]


def test_a_fix_whose_condition_does_not_hold_is_left_out():
    assert (
        names(
            planned(
                fix("enforce_eager", value="True", when=["cudagraph_bytes > 0.0"]),
                base=incident("cuda_oom", cudagraph_bytes=0),
            )
        )
        == []
    )


def test_fix_with_an_unknown_condition_is_listed_not_applied():
    result = planned(fix("enforce_eager", value="True", when=["cudagraph_bytes > 0.0"]))

    (patch,) = result.plan
    assert patch.new is None
    assert not patch.applicable
    assert patch.reason == "The log does not show the memory of captured CUDA graphs."
    assert "The log does not show the memory of captured CUDA graphs." in result.unknown


def test_a_value_that_needs_an_unknown_fact_is_not_solved():
    (patch,) = planned(fix("max_model_len", value="0.5 * max_model_len_tokens")).plan

    assert patch.new is None
    assert patch.reason == "The log does not show the value of max_model_len."


def test_a_lever_names_what_is_missing():
    result = planned(fix("batch_size", lever="shrinks it", missing="rows: not printed"))

    assert result.plan[0].reason == "shrinks it; by how much is not known (rows: not printed)"
    assert "The log does not show the rows." in result.unknown


def test_an_unknown_total_is_listed():
    assert "The log does not show how large the device is." in planned().unknown
    assert (
        "The log does not show how large the device is."
        not in planned(base=incident("cuda_oom", device_total_bytes=GIB)).unknown
    )


def test_a_missing_figure_is_listed_once():
    result = planned(
        fix("batch_size", lever="a", missing="rows: not printed"),
        fix("max_loras", lever="b", missing="rows: not printed"),
    )

    assert result.unknown.count("The log does not show the rows.") == 1


def test_the_planner_solves_a_shipped_rule():
    result = assessed(incident(**TOO_LONG))

    assert names(result) == ["gpu_memory_utilization", "max_model_len"]
    assert 0.80 < result.plan[0].new < 0.90
    assert result.plan[1].new == 122880
    assert next_patch(result).setting == "gpu_memory_utilization"


def test_what_was_tried_is_not_planned_again():
    first = next_patch(assessed(incident(**TOO_LONG)))

    assert names(assessed(incident(**TOO_LONG), tried=[(first.setting, first.new)])) == [
        "max_model_len"
    ]


def test_another_value_of_a_tried_setting_may_be_planned():
    assert "gpu_memory_utilization" in names(
        assessed(incident(**TOO_LONG), tried=[("gpu_memory_utilization", 0.12)])
    )


def test_a_pinned_setting_is_listed_and_not_applied():
    result = assessed(incident(**TOO_LONG), Policy(pinned=frozenset({"gpu_memory_utilization"})))

    assert next_patch(result).setting == "max_model_len"
    assert [patch.blocked_by for patch in result.plan] == [None, "pinned"]
    assert (result.plan[1].as_flag, result.plan[1].as_kwarg) == (
        None,
        None,
    )  # nothing to paste for what is pinned


def test_a_floor_leaves_nothing_to_apply():
    policy = Policy(pinned=frozenset({"gpu_memory_utilization"}), minimum={"max_model_len": 131072})

    assert next_patch(assessed(incident(**TOO_LONG), policy)) is None


def test_byte_count_of_the_user_is_an_alternative_not_a_patch():
    facts = {
        "max_model_len_tokens": 32768,
        "kv_cache_needed_bytes": 21474836,
        "kv_cache_available_bytes": 0,
        "estimated_max_model_len_tokens": 1792,
        "kv_cache_memory_bytes_set": True,
        "num_gpu_blocks_override_set": False,
        "kv_cache_memory_bytes": 1_000_000,
    }
    result = assessed(
        incident(user={"kv_cache_memory_bytes": 1_000_000}, **facts),
        Policy(allow=Effect.CHANGES_OUTPUTS),
    )

    assert names(result) == ["max_model_len"]
    (alternative,) = result.alternatives
    assert (alternative.setting, alternative.new, alternative.why_not) == (
        "kv_cache_memory_bytes",
        18285715,
        "a byte count you set",
    )
    assert alternative.as_flag == "--kv-cache-memory-bytes 18285715"


def test_a_fix_marked_as_an_alternative_is_no_patch():
    result = planned(fix("enforce_eager", value="True", alternative=True))

    assert names(result) == []
    assert [(alternative.setting, alternative.why_not) for alternative in result.alternatives] == [
        ("enforce_eager", "a title")
    ]


def test_nothing_is_planned_for_a_cause_without_a_rule():
    assert assessed(incident("xla_oom")).plan == ()


def test_the_pool_s_own_memory_is_not_taken_for_a_neighbour_s():
    facts = {
        "gpu_memory_utilization_ratio": 0.90,
        "process_in_use_bytes": 72 * GIB,
        "device_total_bytes": 80 * GIB,
        "device_free_bytes": 7 * GIB,
        "tried_bytes": 8 * GIB,
        "allocated_bytes": 70 * GIB,
    }

    failed = replace(incident("cuda_oom", **facts), framework="vllm")
    proposed = {patch.setting: patch.new for patch in assessed(failed).plan}

    assert proposed["gpu_memory_utilization"] is None or proposed["gpu_memory_utilization"] > 0.5


def test_weak_causes_changes_come_after_a_sure_ones(subtests):
    sure, weak = (
        fix("max_num_batched_tokens", lever="less", missing="how much"),
        fix("enforce_eager", value="True"),
    )
    for sureness, first in [(0.79, "max_num_batched_tokens"), (0.5, "enforce_eager")]:
        with subtests.test(sureness=sureness):
            rules = [
                RULE._replace(code="XX101", fixes=(sure,)),
                RULE._replace(code="XX102", fixes=(weak,)),
            ]
            causes = [
                Cause("lora", "XX101", sureness, (), "s"),
                Cause("lora", "XX102", 0.4, (), "s"),
            ]
            base = replace(incident("cuda_oom"), causes=tuple(causes))
            assert names(plan(base, RuleSet((), tuple(rules)), Policy()))[0] == first


def test_a_value_that_is_no_number_is_not_solved(subtests):
    for value in ["1.0 / 0.0", "0.0 / 0.0"]:
        with subtests.test(value=value):
            assert planned(fix("batch_size", value=value)).plan[0].new is None


def test_value_of_a_wrong_type_is_not_solved():
    assert planned(fix("batch_size", value="'many'")).plan[0].new is None


def test_rule_for_an_unknown_setting_is_the_authors_error(subtests):
    for way in [
        {"value": "1.0"},
        {"solve": "rows_that_fit"},
        {"lever": "l", "missing": "m"},
    ]:
        with subtests.test(way=way), pytest.raises(OomguardError, match="batchsize"):
            planned(fix("batchsize", **way))


def test_rule_with_an_unknown_solver_is_the_authors_error():
    with pytest.raises(OomguardError, match="nothing_like_it"):
        planned(fix("batch_size", solve="nothing_like_it"))


def test_value_for_a_setting_of_unknown_origin_is_not_applied():
    facts = {name: value for name, value in TOO_LONG.items() if not name.endswith("_set")}

    result = assessed(incident(complete=False, **facts))

    patch = next(patch for patch in result.plan if patch.setting == "gpu_memory_utilization")
    assert patch.new is not None
    assert not patch.applicable
    assert (
        patch.blocked_by
        == "not known: whether you set kv_cache_memory_bytes, whether you set num_gpu_blocks_override"
    )


# Laws -----------------------------------------------------------------------------------------------------------

KINDS = [
    "cuda_oom",
    "kv_cache_none_left",
    "kv_cache_too_small_for_max_len",
    "cpu_node_memory",
    "startup_free_memory_below_utilization",
]
bytes_of = st.integers(1, 100 * GIB)
any_facts = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            [
                "tried_bytes",
                "device_total_bytes",
                "device_free_bytes",
                "kv_cache_needed_bytes",
                "desired_bytes",
            ],
            bytes_of,
        ),
        **dict.fromkeys(
            [
                "allocated_bytes",
                "process_in_use_bytes",
                "kv_cache_requested_bytes",
                "baseline_bytes",
            ],
            bytes_of,
        ),
        **dict.fromkeys(
            ["max_model_len_tokens", "estimated_max_model_len_tokens", "batch_size"],
            st.integers(1, 10**6),
        ),
        **dict.fromkeys(
            [
                "kv_cache_memory_bytes_set",
                "num_gpu_blocks_override_set",
                "prefix_caching",
                "multimodal",
            ],
            st.booleans(),
        ),
        "kv_cache_available_bytes": st.integers(-50 * GIB, 50 * GIB),
        "gpu_memory_utilization_ratio": st.floats(0.01, 1.0),
    },
)
policies = st.builds(
    Policy,
    allow=st.none() | st.sampled_from(Effect),
    pinned=st.sets(st.sampled_from(["max_model_len"])).map(frozenset),
)


@settings(deadline=None, max_examples=50)
@given(kind=st.sampled_from(KINDS), facts=any_facts, policy=policies, complete=st.booleans())
def test_planning_and_applying_never_repeats_and_ends(kind, facts, policy, complete):
    base = incident(kind, complete=complete, **facts)
    tried: list[tuple[str, object]] = []

    while (patch := next_patch(assessed(base, policy, tried))) is not None:
        assert (patch.setting, patch.new) not in tried
        assert patch.blocked_by is None
        assert patch.setting not in policy.pinned
        tried.append((patch.setting, patch.new))
        assert len(tried) < 50


@settings(deadline=None, max_examples=50)
@given(kind=st.sampled_from(KINDS), facts=any_facts, policy=policies, complete=st.booleans())
def test_a_plan_is_ordered_and_says_why(kind, facts, policy, complete):
    result = assessed(incident(kind, complete=complete, **facts), policy)

    sureness = {cause.rule: cause.confidence for cause in result.causes}
    weak = {name for name, value in sureness.items() if value < result.causes[0].confidence - 0.3}
    order = [(patch.rule not in weak, patch.applicable) for patch in result.plan]
    assert order == sorted(order, reverse=True)
    assert len(names(result)) == len(set(names(result)))
    for patch in result.plan:
        assert patch.reason
        assert patch.applicable == (patch.new is not None and patch.blocked_by is None)
        if policy.allow is not None and patch.applicable:
            assert patch.effect <= policy.allow


def test_alternative_is_used_once_the_better_one_is_ruled_out(subtests):
    for pinned, applied in [((), ["max_num_seqs"]), (("max_num_seqs",), ["max_model_len"])]:
        with subtests.test(pinned=pinned, applied=applied):
            result = planned(
                fix("max_num_seqs", value="8.0", effect=Effect.REDUCES_CAPACITY),
                fix(
                    "max_model_len",
                    value="4096.0",
                    effect=Effect.REDUCES_CAPACITY,
                    alternative=True,
                ),
                policy=Policy(allow=Effect.REDUCES_CAPACITY, pinned=frozenset(pinned)),
                base=incident("cuda_oom", max_model_len_tokens=8192, max_num_seqs=64),
            )
            assert [patch.setting for patch in result.plan if patch.applicable] == applied
            assert [other.setting for other in result.alternatives] == (
                [] if pinned else ["max_model_len"]
            )


def test_a_share_that_decides_nothing_is_lowered_for_nothing(subtests):
    """The engine claims its share before anything else, also where blocks decide how large the KV cache is."""
    for user, effect in [
        ({}, "reduces-capacity"),
        ({"num_gpu_blocks_override": 256}, "output-preserving"),
    ]:
        for kind in ["startup_free_memory_below_utilization", "cpu_node_memory"]:
            with subtests.test(user=user, effect=effect, kind=kind):
                base = incident(
                    kind,
                    user={"gpu_memory_utilization": 0.9, **user},
                    device_free_bytes=8 * GIB,
                    device_total_bytes=24 * GIB,
                    desired_bytes=21.6 * GIB,
                    gpu_memory_utilization_ratio=0.9,
                    gpu_memory_utilization_set=True,
                    num_gpu_blocks_override_set=bool(user),
                    **user,
                )
                found = assessed(replace(base, framework="vllm"))
                (patch,) = [
                    patch for patch in found.plan if patch.setting == "gpu_memory_utilization"
                ]
                assert (str(patch.effect), patch.applicable) == (
                    effect,
                    effect == "output-preserving",
                )
