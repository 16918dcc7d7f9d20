"""What one token takes in attention and in FP8 experts, by the shapes of vLLM's tensors and a published start."""

from __future__ import annotations

import pytest

from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.activations import fp8_inputs, mixer_elements

# Qwen3-235B-A22B: with expert parallelism on four H100 each further token of a step took 163 kB in vLLM 0.20.
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "quantization_config": {"quant_method": "fp8"},
}
DELTA = EXPERTS | {
    "model_type": "qwen3_next",
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}


def test_token_of_fp8_experts_matches_a_published_start():
    workspace = 8 * (4096 + 4096) * 2
    assert workspace + 2 * 4096 * 2 + fp8_inputs(read_shape(EXPERTS), 1) == pytest.approx(
        163e3, rel=0.02
    )


def test_only_fp8_experts_copy_their_inputs(subtests):
    for config, ranks, size in [
        (EXPERTS, 4, 4096 + 8 * 384),
        (EXPERTS | {"quantization_config": None}, 1, 0),
        (EXPERTS | {"num_experts": 0}, 1, 0),
    ]:
        with subtests.test(config=config, ranks=ranks, size=size):
            assert fp8_inputs(read_shape(config), ranks) == size


def test_attention_takes_its_projections_and_its_output(subtests):
    for config, elements in [
        (EXPERTS, 2 * (64 + 4) * 128),
        (DELTA, 2 * 16 * 128 + 4 * 32 * 128),
        (EXPERTS | {"kv_lora_rank": 512}, 0),
    ]:
        with subtests.test(config=config, elements=elements):
            shape = read_shape(config)
            assert mixer_elements(shape, 1) == elements
            assert mixer_elements(shape, 4) == -(-elements // 4)
