"""What may be changed by itself: never a number whose present value is only assumed."""

from __future__ import annotations

from oomguard.core.facts import Fact
from oomguard.core.incident import Effect, Incident, Patch, SettingInForce
from oomguard.diagnosis import diagnose_lines
from oomguard.remedy.policy import Policy, present_value, why_blocked
from oomguard.scan.source import Line

SHARE = "gpu_memory_utilization"
RATIO = "gpu_memory_utilization_ratio"
# A start under AsyncEngineArgs: no list of the arguments is printed.
STARTED = "(EngineCore pid=7) INFO 11-21 07:14:43 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='./m', dtype=torch.float16, max_seq_len=32768, tensor_parallel_size=1, quantization=None"
REQUESTED = "(Worker pid=9) INFO 11-21 07:14:50 [cpu_worker.py:260] Auto set (0.02/22.93) GiB for KV cache on node 0, with 0.64 GiB requested memory for the worker. 0.62 GiB memory was consumed by non-kv usages."
TOO_LONG = "(EngineCore pid=7) ERROR 11-21 07:14:52 [core.py:1510] ValueError: To serve at least one request with the model's max seq len (32768), (0.03 GiB KV cache is needed, which is larger than the available KV cache memory (0.02 GiB). Based on the available memory, the estimated maximum model length is 17408. Try increasing `gpu_memory_utilization`"


def incident(
    *, complete: bool = False, version: str | None = "0.32.0", **facts: object
) -> Incident:
    return Incident(
        "kv_cache_none_left",
        "boom",
        "vllm",
        version,
        facts={name: Fact(name, value) for name, value in facts.items()},
        settings_complete=complete,
    )


def patch(setting: str = SHARE, new: object = 0.93) -> Patch:
    return Patch(setting, None, new, Effect.OUTPUT_PRESERVING, "")


def plan_of(*log: str, given: dict[str, SettingInForce] | None = None) -> dict[str, Patch]:
    lines = [Line(number, 0, text) for number, text in enumerate(log, 1)]
    (found,) = diagnose_lines(lines, settings=given).incidents
    return {p.setting: p for p in found.plan}


def test_assumed_default_is_not_the_present_value():
    assert present_value(SHARE, incident()) is None
    assert why_blocked(patch(), incident(), Policy()) == (
        "its present value is not shown (0.92, the default, is assumed)"
    )


def test_no_permission_of_the_user_makes_an_assumption_a_value():
    assert why_blocked(patch(), incident(), Policy(allow=Effect.CHANGES_OUTPUTS)).startswith(
        "its present value is not shown"
    )


def test_without_a_version_no_default_is_named():
    assert (
        why_blocked(patch(), incident(version=None), Policy()) == "its present value is not shown"
    )


def test_unlisted_setting_is_a_known_default_in_a_full_list():
    assert present_value(SHARE, incident(complete=True)) == 0.92
    assert why_blocked(patch(), incident(complete=True), Policy()) is None


def test_a_printed_value_is_known():
    known = incident(gpu_memory_utilization_ratio=0.5)
    assert (present_value(SHARE, known), why_blocked(patch(), known, Policy())) == (0.5, None)


def test_switch_and_call_arguments_are_set_whatever_they_are(subtests):
    for setting, new in [
        ("enforce_eager", True),
        ("batch_size", 4),
        ("attn_implementation", "sdpa"),
    ]:
        with subtests.test(setting=setting, new=new):
            assert why_blocked(patch(setting, new), incident(), Policy()) is None


def test_requested_over_total_gives_the_share_to_raise():
    raised = plan_of(STARTED, REQUESTED, TOO_LONG)[SHARE]
    assert raised.old == 0.028
    assert 0.028 < raised.new < 0.04
    assert raised.effect == Effect.OUTPUT_PRESERVING
    assert (
        "its present value" not in raised.blocked_by
    )  # whether a byte count is set is another question


def test_a_scripts_flag_is_known_where_the_log_has_no_share():
    flag = {SHARE: SettingInForce(SHARE, 0.5, True, "script")}
    known = incident()
    assert present_value(SHARE, Incident(known.kind, "", "vllm", "0.32.0", settings=flag)) == 0.5


def test_a_step_size_that_nobody_told_is_not_lowered_by_itself():
    assert (
        why_blocked(patch("max_num_batched_tokens", 2048), incident(), Policy())
        == "its present value is not shown"
    )
    assert (
        why_blocked(patch("max_num_batched_tokens", 2048), incident(complete=True), Policy())
        is None
    )
