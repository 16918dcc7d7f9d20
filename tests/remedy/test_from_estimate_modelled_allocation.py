"""An allocation that failed is named by its bytes, and the settings whose product it is are solved."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Incident, SettingInForce
from oomguard.diagnosis import assess, default_rules
from oomguard.remedy.policy import Policy, make_policy

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
}
VOCAB = 128256


@pytest.fixture
def failed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def make(
        tried, kind="host_oom", user=(), phase="unknown", slack=0.0, version="0.32.0", **facts
    ) -> Incident:
        user = {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "max_model_len": 32768,
            **dict(user),
        }
        values = {"model": str(tmp_path), "on_cpu": kind == "host_oom", **facts}
        known = {name: Fact(name, value) for name, value in values.items() if value is not None}
        return Incident(
            kind,
            "boom",
            framework="vllm",
            framework_version=version,
            phase=phase,
            facts={**known, "tried_bytes": Fact("tried_bytes", round(tried), slack=slack)},
            settings={
                name: SettingInForce(name, value, True, "printed") for name, value in user.items()
            },
            settings_complete=True,
        )

    return make


@pytest.fixture
def free_host(monkeypatch):
    def set_bytes(size: int) -> None:
        monkeypatch.setattr("oomguard.probe.host.read_available_bytes", lambda: size)

    return set_bytes


def planned(incident: Incident, allow: str | None = None, pinned: tuple[str, ...] = ()) -> Incident:
    policy = make_policy(allow, pinned) if allow else Policy()
    return assess(incident, default_rules(), policy, local_models=True)


def value(incident: Incident, setting: str):
    return next((patch.new for patch in incident.plan if patch.setting == setting), None)


def test_host_prompt_logprobs_are_solved_by_free_memory(failed, free_host):
    """12 bytes an element of vocabulary and token in what is free beside the engine: 80 % of 3 GiB hold 1674 tokens."""
    free_host(6 * GIB)
    found = planned(failed(8190 * VOCAB * 2, user={"kv_cache_memory_bytes": GIB - 135 * 2**20}))
    assert (found.causes[0].id, found.causes[0].rule) == ("prompt_logprobs", "OG340")
    assert "8190 tokens x 128256 vocabulary x 2 bytes" in found.causes[0].explanation
    step = value(found, "max_num_batched_tokens")
    assert step % 64 == 0
    assert 1300 < step < 1800
    assert step * VOCAB * 12 <= 0.8 * (3 * GIB + 135 * 2**20)


def test_private_memory_limit_leaves_what_the_worker_lacks(failed, free_host):
    """Of 4 GiB the worker holds 1.25 and the cache one: 80 % of the rest."""
    free_host(20 * GIB)
    limited = failed(
        8190 * VOCAB * 2, user={"kv_cache_memory_bytes": GIB}, process_data_limit_bytes=4 * GIB
    )
    step = value(planned(limited), "max_num_batched_tokens")
    assert 0.75 * 1.75 * GIB * 0.8 < step * VOCAB * 12 <= 1.75 * GIB * 0.8


def test_prefix_caching_is_not_offered_off_as_it_frees_nothing(subtests, failed, free_host):
    for caches in [True, False]:
        with subtests.test(caches=caches):
            free_host(6 * GIB)
            found = planned(failed(8190 * VOCAB * 2, user={"enable_prefix_caching": caches}))
            assert not found.alternatives


def test_where_nothing_tells_what_is_free_an_eighth_is_tried(failed, monkeypatch):
    monkeypatch.setattr("oomguard.probe.host.read_available_bytes", lambda: None)
    found = planned(failed(8190 * VOCAB * 2))
    assert value(found, "max_num_batched_tokens") == 1024
    assert found.plan[0].applicable


def test_a_limit_that_no_figure_shows_is_not_taken_for_room(failed, free_host):
    """200 GiB are free, and 2 GiB were refused: by a limit of the process, say."""
    free_host(200 * GIB)
    found = planned(failed(8190 * VOCAB * 2, user={"kv_cache_memory_bytes": GIB}))
    assert value(found, "max_num_batched_tokens") == 1024


def test_step_longer_than_the_prompt_is_cut_below_it(subtests, failed, monkeypatch):
    """Windows of 2048 tokens: a step of 3000 tokens would make the same 2047 x 128256 logits again."""

    def check(free_gib, now):
        free = None if free_gib is None else 12 * GIB
        monkeypatch.setattr("oomguard.probe.host.read_available_bytes", lambda: free)
        user = {
            "max_num_batched_tokens": now,
            "max_model_len": 2049,
            "kv_cache_memory_bytes": 5 * GIB + 2**29,
        }
        found = planned(failed(2047 * VOCAB * 4, user=user))
        assert 64 <= value(found, "max_num_batched_tokens") < 2047
        assert "at 8192" not in found.plan[0].reason

    for free_gib, now in [(12, 8192), (None, 65536)]:
        with subtests.test(free_gib=free_gib, now=now):
            check(free_gib, now)


def test_share_is_of_the_host_before_a_printed_total(failed, free_host, monkeypatch):
    """5 % of 20 GiB and 2 GiB for the worker are its own: 80 % of what is left of 6 GiB hold 1674 tokens."""
    free_host(6 * GIB)
    monkeypatch.setattr("oomguard.probe.host.read_total_bytes", lambda: 20 * GIB)
    found = planned(
        failed(
            8190 * VOCAB * 2,
            user={"gpu_memory_utilization": 0.05},
            gpu_memory_utilization_ratio=0.05,
        )
    )
    assert 1300 < value(found, "max_num_batched_tokens") < 1800


def test_printed_weights_and_pool_are_the_engines(subtests, failed, free_host):
    """1 GiB of each and 2 GiB for the worker: 80 % of 6 GiB hold 5 bytes of 104,857 tokens for that many requests."""
    for weights, solved in [(GIB, 9_800), (None, None)]:
        with subtests.test(weights=weights, solved=solved):
            free_host(10 * GIB)
            user = {
                "kv_cache_memory_bytes": GIB,
                "max_num_seqs": 1_000_000,
                "max_model_len": 104_857,
            }
            incident = failed(
                1_000_000 * 104_857 * 4, user=user, model=None, model_weights_bytes=weights
            )
            rows = value(planned(incident, "reduces-capacity"), "max_num_seqs")
            assert rows == (256 if solved is None else pytest.approx(solved, rel=0.01))


def test_failed_solution_is_not_cut_by_a_little_again(failed, free_host):
    free_host(10 * GIB)
    incident = failed(
        4000 * VOCAB * 4, user={"max_num_batched_tokens": 4160, "kv_cache_memory_bytes": GIB}
    )
    patched = SettingInForce("max_num_batched_tokens", 4160, False, "patched")
    again = replace(incident, settings={**incident.settings, patched.name: patched})
    assert value(planned(again), "max_num_batched_tokens") == 512


def test_a_step_is_not_made_smaller_than_the_rows(failed, monkeypatch):
    monkeypatch.setattr("oomguard.probe.host.read_available_bytes", lambda: None)
    found = planned(failed(8190 * VOCAB * 2, user={"max_num_seqs": 2048}))
    assert value(found, "max_num_batched_tokens") == 2048


def test_cuda_prompt_logprobs_are_solved_by_free_memory(failed):
    """Printed with two digits: the full step of 8192 tokens in float32 is 3.91 GiB."""
    tried = round(8192 * VOCAB * 4 / GIB, 2) * GIB
    found = planned(
        failed(
            tried,
            "cuda_oom",
            slack=0.005 * GIB,
            phase="decode",
            device_total_bytes=80 * GIB,
            device_free_bytes=2 * GIB,
            gpu_memory_utilization_ratio=0.95,
            version="0.19.0",
        )
    )
    assert found.causes[0].id == "prompt_logprobs"
    step = value(found, "max_num_batched_tokens")
    assert 64 <= step < 2 * GIB / VOCAB / 10


def test_a_table_of_all_requests_is_solved_by_fewer_of_them(failed, free_host):
    free_host(10 * GIB)
    many = {
        "max_num_seqs": 1_000_000,
        "max_num_batched_tokens": 1_000_000,
        "kv_cache_memory_bytes": GIB,
    }
    incident = failed(1_000_000 * 32768 * 4, user=many, phase="load_weights")
    found = planned(incident, "reduces-capacity")
    assert (found.causes[0].id, found.causes[0].rule) == ("batch_too_large", "OG341")
    # 1 GiB in blocks of 128 tokens of 512 bytes, one of them the engine's own: each request takes one at least.
    assert value(found, "max_num_seqs") == GIB // (128 * 2 * 2 * 2 * 32 * 2) - 1
    left_alone = {name: one for name, one in incident.settings.items() if name != "max_model_len"}
    length = Fact("max_model_len_tokens", 32768)
    blocked = planned(
        replace(incident, settings=left_alone, facts={**incident.facts, length.name: length})
    )
    assert "max_model_len" in {
        other.setting for other in blocked.alternatives
    }  # no shorter requests for idle rows
    assert all(
        not patch.applicable for patch in blocked.plan
    )  # the user set it, and it reduces the capacity


def test_without_figures_rows_take_the_engine_s_default(failed, monkeypatch):
    monkeypatch.setattr("oomguard.probe.host.read_available_bytes", lambda: None)
    incident = failed(1_000_000 * 32768 * 4, user={"max_num_seqs": 1_000_000}, phase="load_weights")
    assert value(planned(incident, "reduces-capacity"), "max_num_seqs") == 128


def test_slots_of_adapters_are_solved_by_all_matrices_together(failed, free_host):
    free_host(20 * GIB)
    user = {
        "enable_lora": True,
        "max_loras": 20_000,
        "max_lora_rank": 512,
        "kv_cache_memory_bytes": GIB,
    }
    found = planned(
        failed(20_000 * 512 * 256 * 2, user=user, phase="load_weights"), "reduces-capacity"
    )
    assert (found.causes[0].id, found.causes[0].rule) == ("lora", "OG343")
    slots = value(found, "max_loras")
    # A of rank x inputs and B of outputs x rank for q, k, v, o, gate, up and down of two layers.
    each = 2 * 512 * (4 * (256 + 256) - 2 * (256 - 64) + 3 * (256 + 512)) * 2
    around = 2 * 512 * (VOCAB + 256) * 2  # and of the embedding and the head
    assert slots == pytest.approx(
        0.8 * (17 * GIB - 2 * VOCAB * 256 * 2) / (each + around), rel=0.03
    )


def test_largest_known_rank_is_solved_if_adapters_are_pinned(failed, free_host):
    free_host(20 * GIB)
    user = {
        "enable_lora": True,
        "max_loras": 1_000,
        "max_lora_rank": 512,
        "kv_cache_memory_bytes": GIB,
    }
    incident = failed(1_000 * 512 * 256 * 2, user=user, phase="load_weights")
    found = planned(incident, "reduces-capacity", pinned=("max_loras",))
    assert value(found, "max_lora_rank") == 16
    with_adapters = failed(
        1_000 * 512 * 256 * 2, user={**user, "lora_modules": "['a=./a']"}, phase="load_weights"
    )
    unknown = planned(
        with_adapters, "reduces-capacity", pinned=("max_loras",)
    )  # whose rank nothing prints
    assert not any(patch.applicable for patch in unknown.plan if patch.setting == "max_lora_rank")


def test_bytes_that_are_no_product_leave_host_memory_as_cause(failed, free_host):
    free_host(6 * GIB)
    found = planned(failed(123_456_789_123))
    assert found.causes[0].id == "host_ram"
    assert "allocation" not in found.facts


def test_without_the_model_the_settings_alone_may_tell(failed):
    incident = failed(1_000_000 * 32768 * 4, user={"max_num_seqs": 1_000_000}, model=None)
    found = assess(incident, default_rules(), Policy())
    assert found.causes[0].rule == "OG341"


def test_prompt_logprobs_traceback_is_solved_from_rounded_bytes(failed):
    """3.42 GiB is no full step, so the figure alone proves nothing; the frames do."""
    incident = failed(
        3.42 * GIB,
        "cuda_oom",
        slack=0.005 * GIB,
        phase="prompt_logprobs",
        device_total_bytes=95 * GIB,
        device_free_bytes=round(1.5 * GIB),
        gpu_memory_utilization_ratio=0.9,
        version="0.19.0",
    )
    found = planned(incident)
    assert found.causes[0].rule == "OG304"
    assert "allocation" not in found.facts
    assert found.plan[0].setting == "max_num_batched_tokens"
    assert found.plan[0].applicable
    assert 64 <= found.plan[0].new < 1.5 * GIB / VOCAB / 10


def test_a_sampler_s_warm_up_is_solved_by_fewer_rows(failed):
    incident = failed(
        1.96 * GIB,
        "sampler_warmup_oom",
        user={"max_num_seqs": 4096},
        slack=0.005 * GIB,
        device_total_bytes=24 * GIB,
        device_free_bytes=GIB,
        gpu_memory_utilization_ratio=0.9,
        version="0.19.0",
    )
    rows = value(planned(incident, "reduces-capacity"), "max_num_seqs")
    assert 128 <= rows < GIB / VOCAB / 16


def test_more_blocks_than_the_memory_holds_are_cut_to_those(failed):
    incident = failed(
        200_000 * 128 * 2 * 2 * 32 * 2,
        user={"num_gpu_blocks_override": 200_000},
        phase="kv_cache_init",
        num_gpu_blocks_override=200_000,
        kv_cache_fitting_blocks=6387,
    )
    found = planned(incident, "reduces-capacity")
    assert (found.causes[0].id, found.causes[0].rule) == ("kv_blocks_override", "OG347")
    assert found.facts["allocation"].value == "kv_blocks"
    assert value(found, "num_gpu_blocks_override") == 6387


def test_profiled_images_are_solved_by_those_that_fit(failed, free_host, tmp_path):
    """14 images of 576 tokens in a step of 8192, and room for a part of them: the longest step with as many as fit."""
    vision = {
        "hidden_act": "quick_gelu",
        "hidden_size": 128,
        "intermediate_size": 16384,
        "patch_size": 14,
        "image_size": 336,
    }
    architectures = ["LlavaForConditionalGeneration"]
    config = {
        "model_type": "llava",
        "architectures": architectures,
        "text_config": CONFIG,
        "vision_config": vision,
    }
    free_host(5 * GIB)
    incident = failed(
        14 * 577 * 16384 * 4,
        user={"kv_cache_memory_bytes": GIB, "max_model_len": 4096, "dtype": "float32"},
        phase="profile_run",
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(incident)
    assert (found.causes[0].id, found.causes[0].rule) == ("multimodal_profile", "OG348")
    step = value(found, "max_num_batched_tokens")
    assert step % 64 == 0
    assert 4 <= step // 576 < 14
    assert (step + 64) // 576 > step // 576  # another 64 tokens are another image
