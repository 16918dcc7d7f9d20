"""The KV cache of a start by version."""

from __future__ import annotations

import pytest
from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.kv_cache import start_caches
from oomguard.estimate.start.start import VllmSettings

HYBRID = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 1000,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
}


def test_request_has_one_more_mamba_state_in_exporting_versions(subtests):
    for version, states in [("0.31", 2), ("0.32", 3)]:
        with subtests.test(version=version, states=states):
            model = read_model(ModelFiles("a hybrid", "config.json", HYBRID, None))
            settings = VllmSettings(
                Version(version), 24 << 30, 0.9, max_model_len=2048, enable_prefix_caching=True
            )

            layout = start_caches(model, settings).layout

            (group,) = (group for group in layout.groups if group.kind == "state")
            assert group.request_blocks(layout.settings) == states


V4_FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "sliding_window": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "torch_dtype": "bfloat16",
}


def test_a_compressed_cache_holds_what_two_published_starts_printed():
    """1.9 requests of 1,048,576 tokens in 10.29 GiB, and 5.01 of 200,000 in 18.65 GiB."""
    speculation = '{"method": "mtp", "num_speculative_tokens": 2}'
    for version, length, step, pool_gib, at_once in [
        ("0.25.0", 1048576, 4096, 10.29, 1.9008),
        ("0.21.1", 200000, 8192, 18.65, 5.01),
    ]:
        settings = VllmSettings(
            Version(version),
            96 * GIB,
            0.9,
            tensor_parallel_size=2,
            max_model_len=length,
            max_num_batched_tokens=step,
            max_num_seqs=4,
            kv_cache_dtype="fp8",
            speculative_config=speculation,
        )
        files = ModelFiles("v4", "config.json", V4_FLASH, None)
        model = read_model(files, speculative_config=speculation)
        layout = start_caches(model, settings).layout
        found = layout.max_concurrency(layout.blocks(round(pool_gib * GIB)))
        assert found == pytest.approx(at_once, rel=0.05)
    assert model.unread == ()
