"""The registry of settings: effects as the design lists them, values read from text, facts that hold them."""

from __future__ import annotations

import pytest

from oomguard.core.errors import SettingError
from oomguard.core.facts import REGISTRY, Fact
from oomguard.core.incident import Effect, SettingInForce
from oomguard.core.settings import SETTINGS, effect_of, parse_value, setting, value_in_force
from support.each import each

PRESERVES, REDUCES, CHANGES = (
    Effect.OUTPUT_PRESERVING,
    Effect.REDUCES_CAPACITY,
    Effect.CHANGES_OUTPUTS,
)

# The table "Effects" of the design, one row for each patch that it lists and that the registry has a setting for.
EFFECTS = [
    ("gpu_memory_utilization", 0.8, 0.9, PRESERVES),
    ("enforce_eager", False, True, PRESERVES),
    ("cudagraph_capture_sizes", "1 2 4 8", "1 2", PRESERVES),
    ("max_cudagraph_capture_size", 512, 64, PRESERVES),
    ("decode_context_parallel_size", 1, 2, PRESERVES),
    ("skip_mm_profiling", False, True, PRESERVES),
    ("cudagraph_memory_estimate", 1, 0, PRESERVES),
    ("disable_custom_all_reduce", False, True, PRESERVES),
    ("max_num_batched_tokens", 8192, 2048, PRESERVES),
    ("enable_prefix_caching", True, False, PRESERVES),
    ("batch_size", 16, 8, PRESERVES),
    ("prefill_chunk_size", 8192, 512, PRESERVES),
    ("attn_implementation", "eager", "sdpa", PRESERVES),
    ("weights_on_device_bytes", None, 1 << 30, REDUCES),
    ("cache_implementation", "dynamic", "offloaded", PRESERVES),
    ("cache_implementation", "dynamic", "quantized", CHANGES),
    ("cache_implementation", None, "quantized", CHANGES),
    ("allocator_options", "", "expandable_segments:True", PRESERVES),
    ("device", "0", "1", PRESERVES),
    ("logits_to_keep", 0, 1, PRESERVES),
    ("gpu_memory_utilization", 0.9, 0.8, REDUCES),
    ("max_num_seqs", 256, 64, REDUCES),
    ("max_model_len", 32768, 8192, REDUCES),
    ("limit_mm_per_prompt", '{"image": 4}', '{"image": 1}', REDUCES),
    ("max_loras", 8, 2, REDUCES),
    ("kv_cache_memory_bytes", 2**31, 2**30, REDUCES),
    ("num_speculative_tokens", 5, 2, REDUCES),
    ("mem_fraction_static", 0.8, 0.9, PRESERVES),
    ("mem_fraction_static", 0.9, 0.8, REDUCES),
    ("kv_cache_free_ratio", 0.8, 0.9, PRESERVES),
    ("kv_cache_free_ratio", 0.9, 0.8, REDUCES),
    ("hicache_size", 64, 11, PRESERVES),
    ("hicache_ratio", 2.0, 0.5, PRESERVES),
    ("max_total_tokens", 8192, 4096, REDUCES),
    ("max_total_tokens", 4096, 8192, PRESERVES),
    ("max_mamba_cache_size", 96, 32, REDUCES),
    ("max_mamba_cache_size", 32, 96, PRESERVES),
    ("mamba_full_memory_ratio", 0.9, 0.4, PRESERVES),
    ("swa_full_tokens_ratio", 0.1, 0.3, PRESERVES),
    ("flashinfer_workspace_bytes", 2**28, 2**30, PRESERVES),
    ("cuda_graph_max_bs", 160, 32, PRESERVES),
    ("disable_prefill_graphs", False, True, PRESERVES),
    ("ctx_size", 131072, 8192, REDUCES),
    ("tensor_parallel_size", 1, 2, PRESERVES),
    ("kv_cache_dtype", "auto", "fp8", CHANGES),
    ("quantization", "", "awq", CHANGES),
    ("dtype", "float32", "float16", CHANGES),
    ("max_new_tokens", 512, 128, CHANGES),
    ("truncate_prompt_tokens", 4096, 1024, CHANGES),
    ("prompt_logprobs", 5, 0, CHANGES),
    ("num_gpu_blocks_override", 64, 128, PRESERVES),
    ("num_gpu_blocks_override", 128, 64, REDUCES),
    ("block_size", 16, 32, PRESERVES),
    ("enable_lora", True, False, CHANGES),
    ("max_lora_rank", 64, 16, REDUCES),
    (
        "speculative_config",
        '{"num_speculative_tokens": 5}',
        '{"num_speculative_tokens": 2}',
        CHANGES,
    ),
    ("mamba_ssm_cache_dtype", "float32", "float16", CHANGES),
    ("mm_processor_kwargs", None, '{"max_pixels": 1003520}', CHANGES),
    ("pipeline_parallel_size", 1, 2, PRESERVES),
    ("data_parallel_size", 2, 1, PRESERVES),
    ("enable_expert_parallel", False, True, PRESERVES),
    ("cpu_offload_bytes", 0, 2**33, PRESERVES),
]


@each(("name", "old", "new", "effect"), EFFECTS)
def test_effect_is_that_of_the_design(name, old, new, effect):
    assert effect_of(name, old, new) == effect


def test_every_setting_has_a_row_in_the_table_of_effects():
    assert {row[0] for row in EFFECTS} == set(SETTINGS)


@each("name", SETTINGS)
def test_an_unknown_old_value_counts_as_the_dearer_direction(name):
    knob = SETTINGS[name]

    assert effect_of(name, None, 1) == max(knob.raised, knob.lowered)


@each("spelling", ["max_model_len", "max-model-len", "--max-model-len"])
def test_a_setting_is_found_by_each_spelling(spelling):
    assert setting(spelling).name == "max_model_len"


def test_a_typo_in_a_setting_is_corrected():
    with pytest.raises(SettingError, match="unknown setting: max_modle_len") as caught:
        setting("max_modle_len")

    assert caught.value.hint == "did you mean max_model_len?"


def test_an_unknown_setting_lists_the_known():
    with pytest.raises(SettingError) as caught:
        setting("zzz")

    assert "max_model_len" in caught.value.hint


@each(
    ("name", "text", "value"),
    [
        ("max_model_len", "8192", 8192),
        ("gpu_memory_utilization", "0.85", 0.85),
        ("enforce_eager", "TRUE", True),
        ("enforce_eager", "no", False),
        ("kv_cache_memory_bytes", "8GiB", 8 * 2**30),
        ("kv_cache_memory_bytes", "1000000", 1_000_000),
        ("dtype", "float16", "float16"),
    ],
)
def test_a_text_is_read_as_the_setting_s_own_type(name, text, value):
    read = parse_value(name, text)

    assert read == value
    assert type(read) is type(value)


@each(
    ("name", "text"),
    [
        ("max_model_len", "8k"),
        ("max_model_len", "8192.0"),
        ("max_model_len", ""),
        ("gpu_memory_utilization", "much"),
        ("enforce_eager", "perhaps"),
        ("kv_cache_memory_bytes", "8 apples"),
        ("gpu_memory_utilization", "nan"),
        ("gpu_memory_utilization", "inf"),
    ],
)
def test_a_text_of_another_type_is_refused(name, text):
    with pytest.raises(SettingError):
        parse_value(name, text)


@each(
    ("name", "fact", "value"),
    [
        ("gpu_memory_utilization", "gpu_memory_utilization_ratio", 0.5),
        ("mem_fraction_static", "mem_fraction_static_ratio", 0.8),
        ("enable_prefix_caching", "prefix_caching", True),
        ("max_num_seqs", "max_num_seqs", 7),
        ("model", "model", "m"),
    ],
)
def test_a_present_value_is_found_under_the_fact_s_name(name, fact, value):
    assert value_in_force(name, {}, {fact: Fact(fact, value)}) == (value, "printed")


def test_what_the_command_gives_comes_before_what_the_log_prints():
    in_force = {"max_model_len": SettingInForce("max_model_len", 5, True, "command")}

    assert value_in_force(
        "max_model_len", in_force, {"max_model_len_tokens": Fact("max_model_len_tokens", 9)}
    ) == (
        5,
        "command",
    )


def test_every_fact_of_a_setting_is_in_the_registry_of_facts():
    assert {knob.fact for knob in SETTINGS.values() if knob.fact} <= set(REGISTRY)


@each(
    ("name", "unit"),
    [
        ("gpu_memory_utilization", "ratio"),
        ("max_model_len", "tokens"),
        ("kv_cache_memory_bytes", "bytes"),
        ("max_new_tokens", "tokens"),
        ("cpu_offload_bytes", "bytes"),
        ("num_speculative_tokens", "tokens"),
        ("max_num_seqs", ""),
    ],
)
def test_the_unit_is_the_end_of_the_name(name, unit):
    assert SETTINGS[name].unit == unit
