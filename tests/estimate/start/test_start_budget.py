"""The budget of a start: vLLM's own equation, held against what vLLM logged on an H100."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from oomguard.core.errors import ConfigError, SettingError
from oomguard.core.facts import GIB, MIB
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.model.parameters import count_parameters
from oomguard.estimate.start.fixed_parts import cuda_graphs
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start, fit
from oomguard.report.plan import start_record

TABLE = Path(__file__).parents[4] / "shared" / "data" / "llmd_v019_dev.json"
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
H100 = VllmSettings(
    version=Version("0.19.0"), gpu_total_bytes=round(79.19 * GIB), gpu_memory_utilization=0.95
)


def model_of(config: dict = LLAMA):
    from oomguard.estimate.model.shape import read_shape

    return read_model(
        ModelFiles("model", "config.json", config, count_parameters(read_shape(config)))
    )


MODEL = model_of()


def budget(**changes):
    return budget_start(MODEL, replace(H100, **changes))


@pytest.mark.skipif(not TABLE.is_file(), reason="needs ../shared/data")
def test_the_parts_are_those_that_vllm_logged_on_an_h100():
    runs = json.loads(TABLE.read_text())["runs"]
    for run in runs:
        found = budget_start(
            model_of(run["config"]),
            replace(
                H100,
                tensor_parallel_size=run["tensor_parallel_size"],
                pipeline_parallel_size=run["pipeline_parallel_size"],
                kv_cache_dtype=run.get("kv_cache_dtype", "auto"),
            ),
        )
        measured = run["measured_gib"]
        assert found.peak_activation_bytes / GIB == pytest.approx(
            measured["peak_activation"], rel=0.05
        )
        if measured["kv_pool"]:
            assert found.kv_cache_pool_bytes / GIB == pytest.approx(measured["kv_pool"], rel=0.01)
        if run["measured_kv_tokens"]:
            assert found.kv_cache_tokens == pytest.approx(run["measured_kv_tokens"], rel=0.01)
    assert len(runs) >= 10


def test_the_pool_is_what_the_utilization_leaves():
    found = budget()
    spent = found.weights_bytes + found.peak_activation_bytes + found.non_torch_bytes
    assert found.kv_cache_pool_bytes == found.requested_bytes - spent


def test_the_graphs_estimate_is_taken_out_since_0_20():
    def left(start: StartBudget) -> int:
        return start.kv_cache_pool_bytes + start.kept_back_bytes

    old, new = budget(), budget(version=Version("0.20"))
    estimated = cuda_graphs(new.settings, MODEL.shape).estimated_bytes
    assert left(old) - left(new) == estimated > new.cudagraph_bytes
    assert left(budget(version=Version("0.20"), enforce_eager=True)) == left(old)


def test_the_sampler_cost_more_before_0_17():
    assert (
        budget(version=Version("0.16")).peak_activation_bytes > 2.4 * budget().peak_activation_bytes
    )


@settings(deadline=None)
@given(st.floats(0.2, 0.99), st.floats(0.2, 0.99))
def test_higher_utilization_adds_its_share_of_the_device(one, other):
    low, high = sorted((one, other))
    gained = (
        budget(gpu_memory_utilization=high).kv_cache_pool_bytes
        - budget(gpu_memory_utilization=low).kv_cache_pool_bytes
    )
    assert gained == pytest.approx((high - low) * H100.gpu_total_bytes, abs=2)


def test_a_byte_count_for_the_pool_is_taken_as_it_is():
    found = budget(kv_cache_memory_bytes=2**30)
    assert (found.kv_cache_pool_bytes, found.kv_cache_tokens) == (2**30, 8192)


def test_quantised_keys_and_values_hold_twice_the_tokens():
    assert budget(kv_cache_dtype="fp8").kv_bytes_per_token * 2 == budget().kv_bytes_per_token
    scaled = budget(kv_cache_dtype="fp8_per_token_head").kv_bytes_per_token
    assert scaled * 128 == budget(kv_cache_dtype="fp8").kv_bytes_per_token * (128 + 4)


def test_a_latent_vector_of_fp8_ds_mla_takes_656_bytes():
    latent = model_of(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 3,
            "hidden_size": 512,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 1000,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "max_position_embeddings": 4096,
        }
    )
    found = budget_start(latent, replace(H100, kv_cache_dtype="fp8_ds_mla"))
    assert found.kv_bytes_per_token == 3 * 656


def test_prompt_logprobs_are_a_need_that_no_start_reserves():
    assert budget().prompt_logprobs_bytes == 0
    assert budget(prompt_logprobs=True).prompt_logprobs_bytes == 8192 * 128256 * 10
    assert (
        budget(prompt_logprobs=True, version=Version("0.30")).prompt_logprobs_bytes
        == 1024 * 128256 * 2
    )


def test_prompt_logprobs_are_made_prompt_by_prompt():
    """No prompt is longer than max_model_len, however many tokens a step has; what the one before left is there still."""
    windows = budget(prompt_logprobs=True, max_model_len=2048)
    assert windows.prompt_logprobs_bytes == 2048 * 128256 * (10 + 4)


def test_cpu_backend_makes_prompt_logprobs_in_the_first_runner():
    """Its wheel has no Triton, so 0.32 takes the first runner, which makes those of a whole step at once."""
    asked = budget(
        prompt_logprobs=True, device="cpu", version=Version("0.32"), max_num_batched_tokens=4096
    )
    assert asked.prompt_logprobs_bytes == 4096 * 128256 * 10


def test_defaults_follow_version_and_device_and_are_shown(subtests):
    for version, gib, seqs, tokens in [
        ("0.19", 24, 256, 2048),
        ("0.19", 80, 1024, 8192),
        ("0.27", 180, 1024, 8192),
        ("0.28", 180, 1024, 16384),
    ]:
        with subtests.test(version=version, gib=gib, seqs=seqs, tokens=tokens):
            found = budget(version=Version(version), gpu_total_bytes=gib * GIB)
            assert (found.settings.max_num_seqs, found.settings.max_num_batched_tokens) == (
                seqs,
                tokens,
            )
            assert any(str(seqs) in line for line in found.assumptions)


def test_why_it_does_not_fit_is_said_with_both_numbers():
    assert budget().fits
    (reason,) = budget(gpu_total_bytes=24 * GIB, gpu_memory_utilization=0.9).reasons
    assert reason.startswith("one request of 131072 tokens needs 16.00 GiB of KV cache, ")
    assert (
        budget(gpu_memory_utilization=1.0)
        .reasons[0]
        .startswith("the engine needs 79.19 GiB free at its start, an empty GPU has ")
    )
    assert any("nothing is left" in reason for reason in budget(gpu_total_bytes=12 * GIB).reasons)


def test_what_the_engine_would_refuse_is_refused_by_name(subtests):
    for changes, message in [
        ({"tensor_parallel_size": 3}, "does not divide the 32 attention heads"),
        ({"pipeline_parallel_size": 33}, "the model has 32 layers"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype 'int3' is not known"),
        ({"gpu_total_bytes": 0}, "a GPU needs more than 0 bytes"),
        (
            {"tensor_parallel_size": 16, "max_model_len": 200_000},
            "max_model_len is 200000, but the model supports 131072",
        ),
        (
            {"max_num_seqs": 2048, "max_num_batched_tokens": 512},
            "max_num_batched_tokens is 512, less than max_num_seqs 2048",
        ),
        ({"block_size": 24, "version": Version("0.32")}, "block_size 24 is invalid"),
        ({"mamba_ssm_cache_dtype": "int3"}, "dtype is 'int3'"),
    ]:
        with (
            subtests.test(changes=changes, message=message),
            pytest.raises(SettingError, match=message),
        ):
            budget(**changes)


def test_a_dtype_that_is_no_dtype_is_refused():
    with pytest.raises(SettingError, match="dtype is 'int3'"):
        read_model(ModelFiles("model", "config.json", LLAMA, ()), dtype="int3")


def test_a_configuration_without_a_number_names_it():
    config = {**LLAMA, "vocab_size": None, "model_type": "own"}
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size is missing"):
        read_model(ModelFiles("model", "config.json", config, ()))


# Solving


def test_what_fits_is_left_alone():
    found = fit(MODEL, H100)
    assert found.budget is not None
    assert (found.budget.fits, found.changed) == (True, ())


def test_request_too_long_is_cut_to_the_longest_with_a_margin():
    found = fit(MODEL, replace(H100, gpu_total_bytes=24 * GIB, gpu_memory_utilization=0.9))
    assert found.budget is not None
    ((name, before, after),) = found.changed
    assert (name, before) == ("max_model_len", 131072)
    assert found.budget.fits
    longer = replace(found.budget.settings, max_model_len=after + 16)
    assert not budget_start(MODEL, longer).fits


def test_a_low_utilization_is_raised_no_further_than_needed():
    asked = replace(H100, gpu_memory_utilization=0.2, max_model_len=4096)
    found = fit(MODEL, asked)
    assert found.budget is not None
    ((name, _, after),) = found.changed
    assert name == "gpu_memory_utilization"
    assert not budget_start(
        MODEL, replace(asked, gpu_memory_utilization=round(after - 0.01, 2))
    ).fits


def test_a_utilization_above_what_is_free_is_lowered():
    found = fit(MODEL, replace(H100, gpu_memory_utilization=1.0))
    # 0.19 captures its graphs on top of what the utilization allows
    assert found.changed == (("gpu_memory_utilization", 1.0, 0.979),)


def test_a_pool_in_bytes_is_raised_to_what_one_request_needs():
    found = fit(
        MODEL,
        replace(H100, kv_cache_memory_bytes=GIB, max_model_len=32768, gpu_memory_utilization=0.9),
    )
    assert found.budget is not None
    ((name, _, after),) = found.changed
    assert name == "kv_cache_memory_bytes"
    needed = found.budget.stages[0].needed_bytes
    assert needed <= after < needed + MIB


def test_pool_above_the_devices_memory_is_lowered_to_it():
    asked = replace(
        H100, kv_cache_memory_bytes=70 * GIB, max_model_len=32768, gpu_memory_utilization=0.9
    )
    found = fit(MODEL, asked)
    assert found.budget is not None
    ((name, _, after),) = found.changed
    assert name == "kv_cache_memory_bytes"
    left = H100.gpu_total_bytes - found.budget.stages[0].used_bytes
    assert 0 <= left - budget_start(MODEL, asked).uncertainty_bytes < MIB
    assert after < 70 * GIB


def test_a_pool_in_bytes_is_not_raised_into_what_is_uncertain():
    tight = replace(
        H100,
        gpu_total_bytes=round(18.5 * GIB),
        kv_cache_memory_bytes=MIB,
        max_model_len=8192,
        gpu_memory_utilization=0.9,
    )
    needed = replace(tight, kv_cache_memory_bytes=budget_start(MODEL, tight).stages[0].needed_bytes)
    spare = tight.gpu_total_bytes - budget_start(MODEL, needed).stages[0].used_bytes
    assert 0 < spare < budget_start(MODEL, needed).uncertainty_bytes
    assert "kv_cache_memory_bytes" not in {name for name, _, _ in fit(MODEL, tight).changed}


def test_utilization_next_to_a_byte_pool_falls_to_free_memory():
    found = fit(
        MODEL,
        replace(
            H100, kv_cache_memory_bytes=20 * GIB, max_model_len=32768, gpu_memory_utilization=1.0
        ),
    )
    assert found.changed == (("gpu_memory_utilization", 1.0, 0.993),)


def test_what_cannot_fit_says_which_gpus_would():
    small = replace(H100, gpu_total_bytes=12 * GIB)
    found = fit(MODEL, small)
    assert (found.budget, found.tensor_parallel_size) == (None, 4)
    assert found.gpu_total_bytes is not None
    filled = budget_start(MODEL, small).settings
    assert fit(MODEL, replace(filled, gpu_total_bytes=found.gpu_total_bytes)).budget is not None


@settings(deadline=None)
@given(
    st.integers(8, 100),
    st.floats(0.3, 1.0),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1024, 32768, 131072]),
)
def test_what_is_proposed_fits_with_its_margin(gib, utilization, ranks, length):
    asked = replace(
        H100,
        gpu_total_bytes=gib * GIB,
        gpu_memory_utilization=round(utilization, 2),
        tensor_parallel_size=ranks,
        max_model_len=length,
    )
    found = fit(MODEL, asked)
    if found.budget is not None:
        assert found.budget.fits


# What comes on top of a model


def test_a_draft_model_adds_its_weights_and_its_layers_of_cache(tmp_path):
    draft = {
        **LLAMA,
        "num_hidden_layers": 2,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(draft))
    text = json.dumps({"model": str(tmp_path), "num_speculative_tokens": 5})
    from oomguard.estimate.model.shape import read_shape

    files = ModelFiles("model", "config.json", LLAMA, count_parameters(read_shape(LLAMA)))
    found, alone = budget_start(read_model(files, speculative_config=text), H100), budget()

    assert found.weights_bytes == alone.weights_bytes
    assert found.draft_weights_bytes > 2 * 128256 * 1024 * 2
    assert found.kv_bytes_per_token == alone.kv_bytes_per_token + 2 * 2 * 2 * 128 * 2
    assert found.kv_cache_pool_bytes == alone.kv_cache_pool_bytes - found.draft_weights_bytes


def test_further_model_layers_are_loaded_only_for_speculation():
    config = {**LLAMA, "num_nextn_predict_layers": 1}
    from oomguard.estimate.model.files import Parameter
    from oomguard.estimate.model.shape import read_shape

    further = Parameter("model.layers.32.mlp.up_proj.weight", (1024, 1024), 2**21)
    files = ModelFiles(
        "model", "config.json", config, (*count_parameters(read_shape(config)), further)
    )
    found, alone = (
        budget_start(read_model(files, speculative_config='{"method": "mtp"}'), H100),
        budget_start(read_model(files), H100),
    )

    assert found.weights_bytes - alone.weights_bytes == 2**21
    assert found.kv_bytes_per_token - alone.kv_bytes_per_token == 4096


def test_adapters_take_their_slots_from_the_pool():
    found, alone = budget(enable_lora=True, max_loras=4, max_lora_rank=64), budget()
    assert found.lora_bytes > 0
    assert found.kv_cache_pool_bytes == alone.kv_cache_pool_bytes - found.lora_bytes
    assert found.weights_bytes == alone.weights_bytes


def test_weights_in_host_memory_leave_more_for_the_pool():
    assert (
        budget(cpu_offload_bytes=2 * GIB).kv_cache_pool_bytes - budget().kv_cache_pool_bytes
        == 2 * GIB
    )


def test_an_a100_has_the_defaults_of_a_small_device():
    assert budget(gpu_name="NVIDIA A100-SXM4-80GB").settings.max_num_seqs == 256


def test_key_value_heads_indivisible_by_ranks_are_refused():
    odd = model_of(
        {**LLAMA, "num_attention_heads": 40, "num_key_value_heads": 10, "hidden_size": 5120}
    )
    with pytest.raises(
        SettingError, match="neither a divisor nor a multiple of the 10 key-value heads"
    ):
        budget_start(odd, replace(H100, tensor_parallel_size=4))


def test_eight_bit_cache_of_a_checkpoint_holds_twice_the_tokens():
    config = {
        **LLAMA,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": {"num_bits": 8},
            "config_groups": {"g": {"weights": {"num_bits": 8}}},
        },
    }
    assert (
        budget_start(model_of(config), H100).kv_bytes_per_token * 2 == budget().kv_bytes_per_token
    )


def test_layers_that_are_not_read_make_a_range():
    found = budget_start(model_of({**LLAMA, "hybrid_layer_pattern": [0, 1]}), H100)
    assert any(
        "hybrid_layer_pattern in the configuration: oomguard does not read this" in line
        for line in found.assumptions
    )
    assert found.uncertainty_bytes > 5 * budget().uncertainty_bytes
    assert (found.fit, found.unread) == ("unsure", ("hybrid_layer_pattern",))


def test_too_much_at_once_is_solved_together():
    found = fit(MODEL, replace(H100, gpu_total_bytes=24 * GIB, gpu_memory_utilization=1.0))
    assert found.budget is not None
    assert [name for name, _, _ in found.changed] == ["gpu_memory_utilization", "max_model_len"]


def test_the_cpu_backend_has_defaults_of_its_own():
    found = budget(device="cpu", kv_cache_memory_bytes=GIB)
    assert (
        found.settings.max_num_seqs,
        found.settings.max_num_batched_tokens,
        found.block_tokens,
    ) == (128, 2048, 128)


def test_published_file_with_family_defaults_is_read():
    pytest.importorskip("transformers")
    sparse = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34},
        "vision_config": {},
    }
    model = read_model(ModelFiles("model", "config.json", sparse, None))
    assert (model.shape.heads, model.shape.vocab) == (8, 262208)
    said = "num_attention_heads 8, num_key_value_heads 4, vocab_size 262208: missing in the file, so the family's default in transformers applies"
    assert said in model.assumptions
    assert any("vision" in parameter.name for parameter in model.parameters)


SPOILED = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 99), max_size=5),
    st.dictionaries(
        st.sampled_from(
            ["rope_type", "type", "factor", "weights", "num_bits", "quant_method", "bits"]
        ),
        st.one_of(
            st.none(),
            st.floats(),
            st.text(max_size=9),
            st.integers(-5, 5),
            st.lists(st.integers(), max_size=2),
        ),
    ),
)
FIELDS = (
    *LLAMA,
    "head_dim",
    "sliding_window",
    "layer_types",
    "rope_scaling",
    "quantization_config",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "text_config",
    "vision_config",
    "tie_word_embeddings",
    "architectures",
    "partial_rotary_factor",
    "num_kv_shared_layers",
    "model_max_length",
    "hybrid_override_pattern",
    "attention_chunk_size",
)


@settings(deadline=None, max_examples=400)
@given(
    st.dictionaries(st.sampled_from(FIELDS), SPOILED, min_size=1, max_size=4),
    st.sampled_from(
        [
            "llama",
            "gemma2",
            "deepseek_v3",
            "mamba2",
            "nemotron_h",
            "jamba",
            "qwen3_next",
            "llama4_text",
            "phi3",
        ]
    ),
    st.sampled_from([1, 2, 3, 16]),
)
def test_a_spoiled_configuration_is_planned_or_refused_by_name(damage, family, ranks):
    from oomguard.core.errors import UsageError
    from oomguard.estimate.model.shape import read_shape

    config = {**LLAMA, "model_type": family, **damage}
    with contextlib.suppress(UsageError):  # any other exception is a finding
        files = ModelFiles("model", "config.json", config, count_parameters(read_shape(config)))
        found = budget_start(read_model(files), replace(H100, tensor_parallel_size=ranks))
        assert found.weights_bytes >= 0
        json.dumps(start_record(found), allow_nan=False)


def test_smallest_sufficient_gpu_is_named_even_at_full_share():
    found = fit(
        MODEL,
        replace(H100, gpu_total_bytes=8 * GIB, gpu_memory_utilization=1.0, max_model_len=131072),
    )
    assert found.budget is None
    assert found.gpu_total_bytes is not None
    assert found.gpu_total_bytes < 64 * GIB


def test_a_window_holds_the_tokens_of_every_step_in_flight(subtests):
    for version, stages, steps in [
        ("0.25", 2, 1),
        ("0.26", 1, 2),
        ("0.26", 2, 3),
        ("0.33", 1, 2),
        ("0.33", 2, 3),
    ]:
        with subtests.test(version=version, stages=stages, steps=steps):
            windowed = model_of({**LLAMA, "model_type": "mistral", "sliding_window": 4096})
            changed = replace(
                H100,
                version=Version(version),
                pipeline_parallel_size=stages,
                max_num_batched_tokens=2048,
            )
            found = budget_start(windowed, replace(changed, max_num_seqs=64, max_model_len=131072))
            blocks = -(-(4095 + steps * 2048) // 16) + 1
            assert found.max_concurrency == pytest.approx(found.kv_cache_blocks / blocks)


def test_runner_that_profiles_the_plain_sampler_needs_more_later():
    few = {"max_num_seqs": 1024, "max_num_batched_tokens": 1024, "enforce_eager": True}
    early, late = budget(version=Version("0.32"), **few), budget(version=Version("0.33"), **few)
    assert early.peak_activation_bytes < late.peak_activation_bytes
    (said,) = [line for line in early.assumptions if line.startswith("sampler: ")]
    # Logits of 1024 rows in bf16 and their float32 copy, 0.79 GiB, where the start profiled 0.30 GiB.
    assert (
        said == "sampler: needs 0.49 GiB more at its first use than this version's start reserves"
    )
    assert not any(line.startswith("sampler: ") for line in late.assumptions)


def test_utilization_leaves_room_for_unreserved_sampling():
    few = {
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "gpu_memory_utilization": 1.0,
    }
    asked = replace(H100, version=Version("0.32"), **few)
    found = fit(MODEL, asked)
    assert found.budget is not None
    free = H100.gpu_total_bytes - found.budget.not_free_bytes
    assert found.budget.requested_bytes + found.budget.stages[-1].unprofiled_bytes <= free


def test_ranks_that_cannot_share_a_request_are_refused(subtests):
    for changes, message in [
        (
            {"tensor_parallel_size": 8, "decode_context_parallel_size": 3},
            "does not divide tensor_parallel_size 8",
        ),
        (
            {"tensor_parallel_size": 8, "decode_context_parallel_size": 2},
            "1 of 8 ranks store the same key-value heads",
        ),
        ({"tensor_parallel_size": 32, "decode_context_parallel_size": 8}, "4 of 32 ranks store"),
    ]:
        with (
            subtests.test(changes=changes, message=message),
            pytest.raises(SettingError, match=message),
        ):
            budget_start(MODEL, replace(H100, **changes))


def test_ranks_sharing_a_request_hold_multiples_of_its_tokens():
    one = budget_start(MODEL, replace(H100, tensor_parallel_size=16))
    two = budget_start(
        MODEL, replace(H100, tensor_parallel_size=16, decode_context_parallel_size=2)
    )

    assert two.kv_cache_pool_bytes == one.kv_cache_pool_bytes
    assert two.kv_cache_tokens == pytest.approx(2 * one.kv_cache_tokens, rel=1e-3)


def test_start_without_custom_all_reduce_counts_its_old_buffers():
    for version, saved in (("0.9.2", 16 * MIB), ("0.19.0", 0)):
        ranks = replace(H100, version=Version(version), tensor_parallel_size=2)
        off = budget_start(MODEL, replace(ranks, disable_custom_all_reduce=True))
        assert budget_start(MODEL, ranks).non_torch_bytes - off.non_torch_bytes == saved


def test_stage_communicators_count_until_the_device_was_read():
    sizes = [
        budget_start(
            MODEL, replace(H100, version=Version(version), pipeline_parallel_size=2)
        ).non_torch_bytes
        for version in ("0.10.2", "0.11.0", "0.27.0")
    ]
    assert sizes[0] > sizes[1] < sizes[2]


def test_deciding_stage_is_named_if_parts_are_anothers():
    found = budget_start(MODEL, replace(H100, pipeline_parallel_size=2))
    last = found.stages[1]

    assert last.pool_bytes < found.kv_cache_pool_bytes == found.stages[0].pool_bytes
    assert found.kv_cache_tokens * 16 * 4096 <= last.pool_bytes
    assert any(
        line.startswith("pipeline: the tokens are for stage 1") for line in found.assumptions
    )
    assert not any(line.startswith("pipeline") for line in budget_start(MODEL, H100).assumptions)
