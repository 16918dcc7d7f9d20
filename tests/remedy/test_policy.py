"""What the user permits, by effect, by setting and by floor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomguard.core.errors import SettingError
from oomguard.core.incident import Effect, Incident, Patch, SettingInForce
from oomguard.core.settings import effect_of
from oomguard.remedy.policy import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_MAX_PER_HOUR,
    LeastValue,
    Policy,
    is_out_of_question,
    make_policy,
    with_needed,
)

UP = ("gpu_memory_utilization", 0.8, 0.9)
DOWN = ("max_model_len", 32768, 8192)
QUANTISE = ("quantization", "", "awq")


def patch(name, old, new) -> Patch:
    return Patch(name, old, new, effect_of(name, old, new), "because")


def blocks(
    policy: Policy, change, *, set_by_user: bool | None = False, complete: bool = True
) -> str | None:
    """``set_by_user`` None: nothing is known of the setting itself."""
    settings = (
        {}
        if set_by_user is None
        else {change[0]: SettingInForce(change[0], change[1], set_by_user, "command")}
    )
    return policy.blocks(
        patch(*change), Incident("cuda_oom", "boom", settings=settings, settings_complete=complete)
    )


def test_output_preserving_patches_are_always_permitted(subtests):
    for set_by_user in [True, False, None]:
        with subtests.test(set_by_user=set_by_user):
            assert blocks(Policy(), UP, set_by_user=set_by_user, complete=False) is None


def test_reduced_capacity_is_permitted_on_untouched_settings():
    assert blocks(Policy(), DOWN, set_by_user=False) is None


def test_reduced_capacity_is_blocked_on_what_the_user_set():
    assert (
        blocks(Policy(), DOWN, set_by_user=True)
        == "you set it; --allow reduces-capacity permits it"
    )


def test_a_setting_missing_from_a_complete_list_was_left_alone():
    assert blocks(Policy(), DOWN, set_by_user=None, complete=True) is None


def test_setting_missing_from_an_incomplete_list_may_be_set():
    why = blocks(Policy(), DOWN, set_by_user=None, complete=False)

    assert why == "you may have set it; --allow reduces-capacity permits it"


def test_a_setting_of_unknown_origin_may_have_been_set():
    in_force = {"max_model_len": SettingInForce("max_model_len", 32768, None, "measured")}

    why = Policy().blocks(
        patch(*DOWN), Incident("cuda_oom", "boom", settings=in_force, settings_complete=True)
    )

    assert why.startswith("you may have set it")


def test_changed_outputs_are_never_permitted_by_default(subtests):
    for set_by_user in [True, False, None]:
        with subtests.test(set_by_user=set_by_user):
            assert "changes outputs" in blocks(Policy(), QUANTISE, set_by_user=set_by_user)


def test_explicit_limit_permits_every_setting_up_to_it(subtests):
    for allow in list(Effect):
        for change in [UP, DOWN, QUANTISE]:
            for set_by_user in [True, False]:
                with subtests.test(allow=allow, change=change, set_by_user=set_by_user):
                    why = blocks(Policy(allow=allow), change, set_by_user=set_by_user)

                    assert (why is None) == (effect_of(*change) <= allow)
                    assert why is None or f"--allow {allow}" in why


def test_a_pinned_setting_is_never_touched(subtests):
    for allow in [None, *Effect]:
        with subtests.test(allow=allow):
            assert (
                blocks(Policy(allow=allow, pinned=frozenset({"gpu_memory_utilization"})), UP)
                == "pinned"
            )


def test_a_pin_says_nothing_of_other_settings():
    assert blocks(Policy(pinned=frozenset({"max_model_len"})), UP) is None


def test_a_floor_holds_whatever_is_allowed(subtests):
    for floor, blocked in [(8193, True), (8192, False), (4096, False)]:
        for allow in [None, *Effect]:
            with subtests.test(floor=floor, blocked=blocked, allow=allow):
                why = blocks(Policy(allow=allow, minimum={"max_model_len": floor}), DOWN)

                assert (why == f"below your floor of {floor}") == blocked


def test_a_floor_does_not_keep_a_value_from_rising():
    assert blocks(Policy(minimum={"gpu_memory_utilization": 0.85}), UP) is None


def test_a_byte_count_the_user_wrote_is_never_raised(subtests):
    for allow in [None, *Effect]:
        with subtests.test(allow=allow):
            assert (
                blocks(Policy(allow=allow), ("kv_cache_memory_bytes", 1000, 2000), set_by_user=True)
                == "a byte count you set"
            )


def test_a_byte_count_the_user_did_not_write_may_be_raised():
    assert blocks(Policy(), ("kv_cache_memory_bytes", 1000, 2000), set_by_user=False) is None


def test_byte_count_of_the_user_is_lowered_only_if_allowed():
    change = ("kv_cache_memory_bytes", 2000, 1000)

    assert blocks(Policy(), change, set_by_user=True).startswith("you set it")
    assert blocks(Policy(allow=Effect.REDUCES_CAPACITY), change, set_by_user=True) is None


def test_unreadable_byte_count_of_the_user_is_not_raised(subtests):
    for old in [None, "8G"]:
        with subtests.test(old=old):
            change = ("kv_cache_memory_bytes", old, 2000)

            assert (
                blocks(Policy(allow=Effect.REDUCES_CAPACITY), change, set_by_user=True)
                == "a byte count you set"
            )


def test_the_default_policy_is_the_documented_one():
    policy = Policy()

    assert (policy.allow, policy.pinned, dict(policy.minimum), policy.deadline_s) == (
        None,
        frozenset(),
        {},
        None,
    )
    assert policy.max_attempts == DEFAULT_MAX_ATTEMPTS == 4
    assert policy.max_per_hour == DEFAULT_MAX_PER_HOUR == 3


def test_what_the_command_itself_needs_holds_whatever_is_allowed(subtests):
    for need, blocked in [(8193, True), (8192, False), (float("inf"), True), (10**6, True)]:
        for allow in [None, *Effect]:
            with subtests.test(need=need, blocked=blocked, allow=allow):
                policy = with_needed(
                    Policy(allow=allow), {"max_model_len": LeastValue(need, "the command asks for")}
                )
                why = blocks(policy, DOWN)
                assert (
                    why is not None
                    and why.startswith("below ")
                    and why.endswith("the command asks for")
                ) == blocked


def test_of_two_needs_the_larger_one_counts():
    policy = with_needed(
        with_needed(Policy(), {"max_model_len": LeastValue(9, "a")}),
        {"max_model_len": LeastValue(5, "b")},
    )
    assert policy.needed["max_model_len"] == LeastValue(9, "a")


def test_pinned_or_floored_change_is_out_of_question():
    blocked = {
        why: replace(patch(*DOWN), blocked_by=why)
        for why in ("pinned", "below your floor of 9", "you set it; --allow x", None)
    }
    assert [is_out_of_question(one) for one in blocked.values()] == [True, True, False, False]


def test_unchangeable_argument_can_be_pinned_and_a_typo_not():
    assert make_policy(pinned=["--disable-hybrid-kv-cache-manager"]).pinned == {
        "disable_hybrid_kv_cache_manager"
    }
    with pytest.raises(SettingError, match="unknown setting: max_modle_len"):
        make_policy(pinned=["max_modle_len"])
    with pytest.raises(
        SettingError, match="unknown setting: spec_tokens"
    ):  # a part of one that is changed
        make_policy(pinned=["spec_tokens"])
    with pytest.raises(
        SettingError, match="unknown setting: compilation_config"
    ):  # it holds settings that are changed
        make_policy(pinned=["compilation_config"])
