"""Where no printed number leads to a patch, the memory model does: one setting, several together, or none that can."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Effect, Incident, SettingInForce
from oomguard.diagnosis import assess, default_rules
from oomguard.estimate.start.failed_start import read_failed_start
from oomguard.estimate.start.start_budget import budget_start
from oomguard.remedy.planner import next_patches
from oomguard.remedy.policy import Policy, make_policy

# The shape of an 8B: 14.96 GiB of weights, 128 KiB of KV cache a token.
CONFIG = json.loads(
    (Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json").read_text()
)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def none_left(model, *, total=24 * GIB, ratio=0.9, left=-1 * GIB, user=(), **facts):
    """A start that printed how much its KV cache lacked; ``user`` are the settings that the user gave."""
    values = {
        "device_total_bytes": total,
        "gpu_memory_utilization_ratio": ratio,
        "kv_cache_available_bytes": left,
        "model": model,
        "max_model_len_tokens": 8192,
        **facts,
    }
    return Incident(
        "kv_cache_none_left",
        "boom",
        framework="vllm",
        framework_version="0.19.0",
        facts={name: Fact(name, value) for name, value in values.items()},
        settings={
            name: SettingInForce(name, value, True, "command") for name, value in dict(user).items()
        },
        settings_complete=True,
    )


def planned(incident, policy=None):
    return assess(incident, default_rules(), policy or Policy(), local_models=True)


def by_setting(incident):
    return {patch.setting: patch for patch in incident.plan}


def test_the_model_is_put_right_by_what_the_start_printed(model):
    start = read_failed_start(none_left(model, left=-3 * GIB))
    assert budget_start(start.model, start.settings).kv_cache_pool_bytes == -3 * GIB


def test_a_lever_without_printed_figures_is_solved(model):
    """Little more can be had from the utilization: the profile peak has to shrink, and the model says how far."""
    found = planned(
        none_left(
            model,
            ratio=0.93,
            left=-GIB // 4,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            max_model_len_tokens=2048,
        )
    )
    seqs = by_setting(found)["max_num_seqs"]
    assert seqs.new is not None
    assert 8 <= seqs.new < 1024
    assert "by the memory model" in seqs.reason
    alone = planned(none_left("org/unread", ratio=0.96, left=-GIB // 4))
    assert by_setting(alone)["max_num_seqs"].new is None


def test_two_settings_that_suffice_only_together_are_one_group(model):
    """0.2 GiB lacks and the device has some more: not enough for 131072 tokens, which need 16 GiB."""
    incident = none_left(model, left=-GIB // 5, max_model_len_tokens=131072)
    found = planned(incident, make_policy("reduces-capacity"))
    together = next_patches(found, lambda _name: True)
    assert {patch.setting for patch in together} == {"gpu_memory_utilization", "max_model_len"}
    assert {patch.group for patch in together} == {1}
    values = {patch.setting: patch.new for patch in together}
    start = read_failed_start(incident)
    pool = -GIB // 5 + (values["gpu_memory_utilization"] - 0.9) * 24 * GIB
    assert (values["max_model_len"] + 16) * 131072 <= pool
    assert (values["max_model_len"] + 4096) * 131072 > pool - budget_start(
        start.model, start.settings
    ).uncertainty_bytes
    assert together[0].predicts["kv_cache_available_bytes"] == pytest.approx(pool, rel=0.01)


def test_together_is_blocked_as_one_where_one_of_them_is(model):
    incident = none_left(
        model, left=-GIB // 5, max_model_len_tokens=131072, user={"max_model_len": 131072}
    )
    found = planned(incident)
    assert next_patches(found, lambda _name: True) == ()
    assert "you set it" in by_setting(found)["max_model_len"].blocked_by
    assert by_setting(found)["gpu_memory_utilization"].blocked_by is not None


def test_value_from_an_assumed_share_is_not_applied(model):
    """A script under AsyncEngineArgs prints no arguments: 0.9 is the version's default, the truth may be a tenth of it."""
    known = none_left(model, left=GIB // 2, user={"max_model_len": 8192})
    facts = {
        name: fact for name, fact in known.facts.items() if name != "gpu_memory_utilization_ratio"
    }
    facts["kv_cache_needed_bytes"] = Fact("kv_cache_needed_bytes", GIB)
    assumed = replace(
        known, kind="kv_cache_too_small_for_max_len", facts=facts, settings_complete=False
    )
    for allow in (None, "output-preserving"):
        found = planned(assumed, make_policy(allow))
        raised = by_setting(found)["gpu_memory_utilization"]
        assert raised.old is None
        assert raised.new is None or raised.blocked_by.startswith("its present value is not shown")
        assert "gpu_memory_utilization" not in {
            patch.setting for patch in next_patches(found, lambda _name: True)
        }
    listed = planned(replace(assumed, settings_complete=True))
    assert {patch.setting for patch in next_patches(listed, lambda _name: True)} == {
        "gpu_memory_utilization"
    }


def test_a_floor_and_a_pin_hold_for_what_the_model_solves(model):
    incident = none_left(model, left=-GIB // 5, max_model_len_tokens=131072)
    floored = planned(incident, make_policy("reduces-capacity", minimum={"max_model_len": 65536}))
    assert next_patches(floored, lambda _name: True) == ()
    pinned = planned(incident, make_policy("reduces-capacity", ["gpu_memory_utilization"]))
    assert "gpu_memory_utilization" not in {
        patch.setting for patch in next_patches(pinned, lambda _name: True)
    }


def test_smallest_device_and_ranks_are_named_if_nothing_fits(model):
    found = planned(
        none_left(model, total=8 * GIB, left=-10 * GIB), make_policy("reduces-capacity")
    )
    assert next_patches(found, lambda _name: True) == ()
    others = {other.setting: other for other in found.alternatives}
    (ranks,) = [patch for patch in found.plan if patch.setting == "tensor_parallel_size"]
    assert ranks.new >= 2
    assert "devices of its size" in ranks.reason
    assert "tensor_parallel_size" not in others
    # 14.96 GiB of weights, 10 GiB lack, and 8 GiB more than 0.9 of the device cannot be had.
    assert others["cpu_offload_bytes"].new in {part * GIB for part in range(10, 14)}
    assert (
        others["cpu_offload_bytes"].as_flag
        == f"--cpu-offload-gb {others['cpu_offload_bytes'].new // GIB}"
    )
    assert "one of" in others["device"].why_not


def test_the_effect_of_each_patch_is_the_registry_s(model):
    found = planned(
        none_left(model, left=-GIB // 5, max_model_len_tokens=131072),
        make_policy("reduces-capacity"),
    )
    effects = {patch.setting: patch.effect for patch in next_patches(found, lambda _name: True)}
    assert effects == {
        "gpu_memory_utilization": Effect.OUTPUT_PRESERVING,
        "max_model_len": Effect.REDUCES_CAPACITY,
    }


def test_a_name_that_is_no_path_here_reads_no_model(subtests):
    for name in ["~nobody_such/model", "x" * 300, "a\0b"]:
        with subtests.test(name=name):
            assert read_failed_start(none_left(name)) is None


def test_failure_outside_the_model_is_not_solved_by_it(model):
    found = planned(
        replace(
            none_left(model, total=80 * GIB, left=50 * GIB, max_num_seqs=256),
            kind="sampler_warmup_oom",
        )
    )
    assert not any("memory model" in patch.reason for patch in found.plan)


def test_pool_set_by_something_unseen_is_not_blamed_on_the_share(model):
    """VLLM_CPU_KVCACHE_SPACE: the share was raised four times, and nothing changed."""
    incident = none_left(
        model, left=GIB, kv_cache_is_fixed=True, kv_cache_needed_bytes=4 * GIB, max_model_len=32768
    )
    found = planned(
        replace(incident, kind="kv_cache_too_small_for_max_len"), make_policy("reduces-capacity")
    )
    assert "gpu_memory_utilization" not in by_setting(found)
    assert not any(
        other.setting in {"device", "tensor_parallel_size"} for other in found.alternatives
    )


def profiling(model, kind="cuda_oom", phase="profile_run", *, total=24 * GIB, **facts):
    """An allocation that failed while the engine profiled: 15 GiB of weights, and all the rest taken by one step."""
    values = {
        "device_total_bytes": total,
        "device_free_bytes": GIB // 4,
        "process_in_use_bytes": total - GIB // 4,
        "allocated_bytes": total - GIB,
        "reserved_unallocated_bytes": 0,
        "tried_bytes": 7 * GIB // 2,
        "gpu_memory_utilization_ratio": 0.9,
        "profiling_frames": True,
        "model": model,
        "max_model_len_tokens": 8192,
        "max_num_seqs": 64,
        **facts,
    }
    known = {name: Fact(name, value) for name, value in values.items()}
    given = {
        name: SettingInForce(name, values[fact], True, "command")
        for name, fact in (
            ("gpu_memory_utilization", "gpu_memory_utilization_ratio"),
            ("max_num_seqs", "max_num_seqs"),
        )
    }
    return Incident(
        kind,
        "boom",
        framework="vllm",
        framework_version="0.19.0",
        phase=phase,
        facts=known,
        settings=given,
        settings_complete=True,
    )


def test_step_that_did_not_fit_next_to_weights_is_lowered(model):
    """The peak scales with the step's tokens, and one request's KV cache has to fit beside it."""
    found = planned(profiling(model, max_num_batched_tokens=65536, model_weights_bytes=15 * GIB))
    assert found.causes[0].id == "batch_too_large"  # the weights are known to leave room
    (patch,) = next_patches(found, lambda _name: True)
    assert patch.setting == "max_num_batched_tokens"
    assert patch.effect is Effect.OUTPUT_PRESERVING
    assert 8192 <= patch.new < 65536
    start = read_failed_start(found)
    after = budget_start(start.model, replace(start.settings, max_num_batched_tokens=patch.new))
    assert after.fits
    assert after.peak_activation_bytes <= (24 - 15) * GIB


def test_where_the_sampler_did_not_fit_fewer_requests_run(model):
    found = planned(
        profiling(
            model,
            "sampler_warmup_oom",
            "sampling_logits",
            max_num_batched_tokens=8192,
            max_num_seqs=4096,
        ),
        make_policy("reduces-capacity"),
    )
    (patch,) = next_patches(found, lambda _name: True)
    assert patch.setting == "max_num_seqs"
    assert 256 <= patch.new < 4096


def test_before_there_is_a_kv_cache_no_share_is_lowered(subtests, model):
    """vLLM's own message advises it; the share holds nothing yet that could be given back."""
    for kind, phase, rows in [
        ("cuda_oom", "profile_run", 64),
        ("sampler_warmup_oom", "sampling_logits", 4096),
    ]:
        with subtests.test(kind=kind, phase=phase, rows=rows):
            found = planned(
                profiling(model, kind, phase, max_num_batched_tokens=8192, max_num_seqs=rows),
                make_policy("reduces-capacity"),
            )
            assert "gpu_memory_utilization" not in by_setting(found)
