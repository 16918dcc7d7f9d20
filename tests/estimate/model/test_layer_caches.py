"""What each layer keeps: by the file's own layer types, else by the pattern of its family."""

from __future__ import annotations

import pytest

from oomguard.core.errors import ConfigError
from oomguard.estimate.model.layer_caches import layer_caches, layer_kinds, unread_fields
from oomguard.estimate.model.shape import read_shape

BASE = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 1024,
}


def shape(**changes):
    return read_shape({**BASE, **changes})


def kinds(**changes) -> str:
    return " ".join(layer_kinds(shape(**changes)))


def test_a_plain_decoder_attends_in_full():
    assert kinds() == "full full full full"


def test_token_bytes_are_heads_times_size_times_element():
    assert [cache.token_bytes for cache in layer_caches(shape(), kv_element_bytes=2)] == [
        2 * 2 * 8 * 2
    ] * 4
    assert layer_caches(shape(), kv_element_bytes=1)[0].token_bytes == 2 * 2 * 8


def test_ranks_beyond_the_heads_each_hold_a_copy(subtests):
    for ranks, heads in [(1, 2), (2, 1), (4, 1), (8, 1)]:
        with subtests.test(ranks=ranks, heads=heads):
            (first, *_) = layer_caches(shape(), kv_element_bytes=2, tensor_parallel_size=ranks)
            assert first.token_bytes == 2 * heads * 8 * 2


def test_the_layers_kinds_follow_the_family(subtests):
    for changes, expected in [
        ({"sliding_window": 128}, "sliding sliding sliding sliding"),
        ({"sliding_window": 128, "use_sliding_window": False}, "full full full full"),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128},
            "sliding full sliding full",
        ),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, "full full full full"),
        ({"model_type": "gemma2", "sliding_window": 128}, "sliding full sliding full"),
        ({"model_type": "cohere2", "sliding_window": 128}, "sliding sliding sliding full"),
        (
            {"model_type": "gemma3_text", "sliding_window": 128, "sliding_window_pattern": 2},
            "sliding full sliding full",
        ),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, "chunked chunked chunked full"),
        (
            {
                "model_type": "llama4_text",
                "attention_chunk_size": 64,
                "no_rope_layers": [1, 0, 1, 0],
            },
            "chunked full chunked full",
        ),
        ({"model_type": "llama4_text"}, "full full full full"),
        ({"model_type": "qwen3_next"}, "delta delta delta full"),
        (
            {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1},
            "mamba1 full mamba1 full",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"}, "mamba2 none full none"),
        ({"model_type": "bamba", "attn_layer_indices": [2]}, "mamba2 mamba2 full mamba2"),
        ({"model_type": "zamba2", "hybrid_layer_ids": [1]}, "mamba2 mamba2+full mamba2 mamba2"),
        ({"model_type": "falcon_h1"}, "mamba2+full mamba2+full mamba2+full mamba2+full"),
        ({"model_type": "lfm2", "full_attn_idxs": [3]}, "conv conv conv full"),
        ({"model_type": "mamba", "state_size": 16}, "mamba1 mamba1 mamba1 mamba1"),
        ({"num_kv_shared_layers": 2}, "full full none none"),
    ]:
        with subtests.test(changes=changes, expected=expected):
            assert kinds(**changes) == expected


def test_layer_types_that_cannot_be_are_named(subtests):
    for changes, message in [
        ({"layer_types": ["full_attention"] * 3}, "name 3 layers, but num_hidden_layers is 4"),
        ({"layer_types": ["no such"] * 4}, "layer_types has the unknown type 'no such'"),
        ({"layer_types": [1] * 4}, "layer_types has the unknown type 1"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MMXM"},
            "hybrid_override_pattern has the unknown letter 'X'",
        ),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, but the model has 4 layers"),
    ]:
        with (
            subtests.test(changes=changes, message=message),
            pytest.raises(ConfigError, match=message),
        ):
            kinds(**changes)


def test_a_latent_cache_is_one_vector_that_every_rank_holds():
    deepseek = shape(model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64)
    for ranks in (1, 8):
        cache = layer_caches(deepseek, kv_element_bytes=2, tensor_parallel_size=ranks)[0]
        assert (cache.token_bytes, cache.latent) == (576 * 2, True)


def test_heads_are_padded_as_in_vllm_0_6_without_latents():
    deepseek = shape(
        model_type="deepseek_v3",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        hidden_size=7168,
        num_attention_heads=128,
        num_key_value_heads=128,
    )
    cache = layer_caches(deepseek, kv_element_bytes=2, tensor_parallel_size=8, latent=False)[0]
    # 16 heads of 256, keys and values: 31 layers of it are the 507,904 bytes a token that 0.6.6 had on eight ranks and two stages
    assert (cache.token_bytes, cache.latent) == (507_904 // 31, False)


def test_another_family_unfolds_its_latent_vector():
    minicpm = shape(
        model_type="minicpm3",
        kv_lora_rank=256,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        num_key_value_heads=8,
    )
    assert layer_caches(minicpm, kv_element_bytes=2)[0].token_bytes == 2 * 8 * 96 * 2


def test_a_state_has_one_size_whatever_the_length():
    mamba = shape(model_type="mamba", state_size=16, conv_kernel=4, intermediate_size=128)
    (first, *_) = layer_caches(mamba, kv_element_bytes=2)
    assert (first.kind, first.token_bytes, first.state_bytes) == (
        "state",
        0,
        128 * (3 * 2 + 16 * 2),
    )
    (first, *_) = layer_caches(
        mamba, kv_element_bytes=2, state_dtype_bytes=4, tensor_parallel_size=2
    )
    assert first.state_bytes == 64 * (3 * 2 + 16 * 4)


def test_a_state_without_its_numbers_is_refused_by_name():
    with pytest.raises(ConfigError, match="conv_kernel is missing"):
        layer_caches(shape(model_type="mamba", state_size=16), kv_element_bytes=2)


def test_a_sparse_attention_s_indexer_keeps_its_own_keys():
    sparse = shape(
        model_type="deepseek_v32",
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_topk=2048,
        index_head_dim=128,
    )
    caches = layer_caches(sparse, kv_element_bytes=2)
    assert sum(cache.token_bytes for cache in caches if cache.index == 0) == 576 * 2 + 128 + 4


MIMO = {
    "model_type": "mimo_v2_flash",
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 0],
}


def test_a_pattern_of_numbers_gives_windows_their_own_heads():
    found = layer_caches(shape(**MIMO), kv_element_bytes=2)
    assert [cache.kind for cache in found] == ["full", "sliding", "sliding", "full"]
    assert [cache.token_bytes for cache in found[:2]] == [4 * (192 + 128) * 2, 8 * (192 + 128) * 2]


def test_searched_architecture_has_own_heads_per_layer_or_none():
    blocks = [{"attention": {"no_op": False, "n_heads_in_group": n}} for n in (4, 8, 2)]
    blocks.insert(1, {"attention": {"no_op": True, "n_heads_in_group": None}})
    found = layer_caches(shape(model_type="nemotron-nas", block_configs=blocks), kv_element_bytes=2)
    assert [(cache.index, cache.token_bytes) for cache in found] == [
        (0, 2 * 2 * 8 * 2),
        (2, 2 * 8 * 2),
        (3, 4 * 2 * 8 * 2),
    ]


def test_delta_attention_keeps_a_state_next_to_latent_layers():
    part = {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    }
    kimi = shape(
        model_type="kimi_linear", linear_attn_config=part, kv_lora_rank=512, qk_rope_head_dim=64
    )
    states, latent = (
        layer_caches(kimi, kv_element_bytes=2)[:3],
        layer_caches(kimi, kv_element_bytes=2)[3],
    )
    # 32 heads of 128: the last three tokens of queries, keys and values in bf16, and a square of float32 for each head.
    assert {cache.state_bytes for cache in states} == {3 * 32 * 128 * 3 * 2 + 32 * 128 * 128 * 4}
    assert (latent.kind, latent.token_bytes) == ("full", (512 + 64) * 2)


def test_a_pattern_that_cannot_be_is_named(subtests):
    for changes, message in [
        ({**MIMO, "hybrid_layer_pattern": [0, 2, 1, 1]}, "must be a list of 0 and 1"),
        ({**MIMO, "swa_head_dim": None}, "swa_head_dim is missing"),
        (
            {"block_configs": [{"attention": {}}]},
            "does not describe the attention of each of 4 layers",
        ),
        (
            {"model_type": "bamba", "attn_layer_indices": [[1]]},
            "attn_layer_indices must be a list of layers, got",
        ),
        (
            {"model_type": "zamba2", "hybrid_layer_ids": [{}]},
            "hybrid_layer_ids must be a list of layers, got",
        ),
        (
            {"block_configs": [{"attention": {"n_heads_in_group": 0}}] * 4},
            "n_heads_in_group 0 for layer 0",
        ),
        ({"linear_attn_config": {"kda_layers": 3}}, "no list kda_layers"),
        (
            {"linear_attn_config": {"kda_layers": [1], "num_heads": True}},
            "num_heads, head_dim or short_conv_kernel_size",
        ),
    ]:
        with (
            subtests.test(changes=changes, message=message),
            pytest.raises(ConfigError, match=message),
        ):
            layer_caches(shape(**changes), kv_element_bytes=2)


def test_blocks_of_another_form_are_said_to_be_not_read():
    puzzle = shape(block_configs=[{"block_type": "moe"}] * 4)
    assert layer_kinds(puzzle) == ("full",) * 4
    assert unread_fields(puzzle) == ("block_configs",)


def test_a_key_that_nobody_knows_is_unread_with_its_name_unless_it_has_no_size():
    for changes, unread in [
        ({"kv_sketch_ratio": 4}, ("kv_sketch_ratio",)),
        ({"compress_ratios": [4, 128]}, ("compress_ratios",)),
        ({"model_type": "llama_of_tomorrow"}, ("model_type 'llama_of_tomorrow'",)),
        ({"is_encoder_decoder": True}, ("is_encoder_decoder",)),
        ({"kv_sketch_ratio": None, "compress_ratios": []}, ()),
        ({"my_tokenizer_version": "2", "attention_dropout": 0.1, "bos_token_id": 1}, ()),
    ]:
        assert unread_fields(shape(**changes)) == unread
