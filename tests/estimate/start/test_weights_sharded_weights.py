"""Each rank's weights: sharded as vLLM shards them, nothing lost, and equal to what vLLM logged on an H100."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.parameters import (
    build_on_meta,
    count_parameters,
    parameters_from_layout,
)
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.weights import (
    first_of_fullest,
    fused_name,
    rank_weights,
    stage_layers,
    unsplit_bytes,
)

TABLE = Path(__file__).parents[4] / "shared" / "data" / "llmd_v019_dev.json"
GIB = 2**30
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 256,
}
SHAPE = read_shape(LLAMA)


def test_transformers_and_the_count_agree_on_a_plain_decoder():
    pytest.importorskip("transformers")
    built = build_on_meta(SHAPE)

    assert built is not None
    assert sum(p.bytes for p in built) == sum(p.bytes for p in count_parameters(SHAPE))


@pytest.mark.skipif(not TABLE.is_file(), reason="needs ../shared/data")
def test_the_weights_are_those_that_vllm_logged_on_an_h100():
    runs = [run for run in json.loads(TABLE.read_text())["runs"] if run["measured_gib"]["weights"]]
    for run in runs:
        shape = read_shape(run["config"])
        ranks, stages = run["tensor_parallel_size"], run["pipeline_parallel_size"]
        held = rank_weights(
            count_parameters(shape),
            shape,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
        )
        assert held.fullest_bytes / GIB == pytest.approx(run["measured_gib"]["weights"], rel=0.005)
    assert len(runs) >= 5


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_share_the_layers_in_order_and_nearly_evenly(layers, stages):
    parts = stage_layers(layers, stages)

    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_what_does_not_divide_goes_to_the_stages_before_the_last(subtests):
    for layers, stages, expected in [
        (32, 4, [8, 8, 8, 8]),
        (30, 4, [7, 8, 8, 7]),
        (29, 2, [15, 14]),
    ]:
        with subtests.test(layers=layers, stages=stages, expected=expected):
            assert [len(part) for part in stage_layers(layers, stages)] == expected


def test_matrices_are_sharded_and_vectors_are_whole():
    held = rank_weights(
        [Parameter("model.layers.0.mlp.up_proj.weight", (128, 64), 16384)],
        SHAPE,
        tensor_parallel_size=4,
    )
    norm = rank_weights(
        [Parameter("model.layers.0.input_layernorm.weight", (64,), 128)],
        SHAPE,
        tensor_parallel_size=4,
    )

    assert held.fullest_bytes - held.tables_bytes == 4096
    assert norm.fullest_bytes - norm.tables_bytes == 128


def test_what_a_rank_of_eight_holds_of_a_matrix(subtests):
    for name, parts in [
        ("model.layers.0.self_attn.q_proj.weight", 8),
        ("model.layers.0.self_attn.k_proj.weight", 2),  # two heads: ranks beyond them hold copies
        ("model.layers.0.mlp.gate.weight", 1),  # the router
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 1),
        ("model.layers.0.mlp.experts.0.up_proj.weight", 8),
        ("model.layers.0.mlp.gate_proj.weight", 8),
    ]:
        with subtests.test(name=name, parts=parts):
            held = rank_weights([Parameter(name, (64, 64), 8192)], SHAPE, tensor_parallel_size=8)
            assert held.fullest_bytes - held.tables_bytes == 8192 // parts


def test_experts_are_spread_over_the_data_parallel_ranks_too():
    expert = [Parameter("model.layers.0.mlp.experts.0.up_proj.weight", (64, 64), 8192)]
    held = rank_weights(expert, SHAPE, tensor_parallel_size=2, expert_ranks=8)
    assert held.fullest_bytes - held.tables_bytes == 1024


def test_a_vocabulary_is_filled_up_to_a_multiple_of_64():
    held = rank_weights([Parameter("model.embed_tokens.weight", (100, 64), 12800)], SHAPE)
    assert held.fullest_bytes - held.tables_bytes == 128 * 64 * 2


def test_tied_embeddings_stand_on_both_ends_of_a_pipeline():
    tied = [Parameter("model.embed_tokens.weight", (128, 64), 16384)]
    first, *_, last = rank_weights(tied, SHAPE, pipeline_parallel_size=4).stages_bytes
    assert first == last


def test_layers_behind_the_last_are_loaded_for_speculation_only():
    extra = [Parameter("model.layers.4.mlp.up_proj.weight", (128, 64), 16384)]
    held = rank_weights(extra, SHAPE)
    assert held.fullest_bytes == held.tables_bytes


def test_an_encoder_s_layers_stand_with_the_first_stage():
    vision = [Parameter("vision_tower.encoder.layers.9.mlp.fc1.weight", (128, 64), 16384)]
    held = rank_weights(vision, SHAPE, pipeline_parallel_size=2)
    assert held.stages_bytes[0] - held.tables_bytes == 16384


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_all_ranks_together_hold_at_least_the_model(ranks, stages):
    parameters = count_parameters(SHAPE)
    held = rank_weights(
        parameters, SHAPE, tensor_parallel_size=ranks, pipeline_parallel_size=stages
    )

    assert ranks * sum(held.stages_bytes) >= sum(p.bytes for p in parameters)
    assert held.stages_bytes[first_of_fullest(held.stages_bytes)] >= 0.99 * held.fullest_bytes


def test_multi_token_layers_are_loaded_only_for_speculation():
    extra = [Parameter("mtp.layers.0.mlp.up_proj.weight", (128, 64), 16384)]
    assert rank_weights(extra, SHAPE).fullest_bytes == rank_weights([], SHAPE).fullest_bytes
    assert (
        rank_weights(extra, SHAPE, mtp_layers=True).fullest_bytes
        == rank_weights([], SHAPE).fullest_bytes + 16384
    )


def test_a_head_that_is_the_embedding_once_more_is_not_loaded():
    head = [Parameter("lm_head.weight", (128, 64), 16384)]
    tied = read_shape({**LLAMA, "tie_word_embeddings": True})
    assert rank_weights(head, tied).fullest_bytes == rank_weights([], tied).fullest_bytes
    assert rank_weights(head, SHAPE).fullest_bytes == rank_weights([], SHAPE).fullest_bytes + 16384


def test_experts_in_one_tensor_are_spread_too():
    experts = [
        Parameter("model.layers.0.block_sparse_moe.input_linear.weight", (8, 128, 64), 131072)
    ]
    held = rank_weights(experts, SHAPE, expert_ranks=8)
    assert held.fullest_bytes - held.tables_bytes == 16384


def test_large_tensor_keeps_the_unsplit_rest_of_its_block(subtests):
    for mib, unsplit_mib in [
        (259, 1),
        (129.5, 0.5),
        (64.75, 0),
        (32, 0),
        (31.5, 0.5),
        (9.5, 0),
        (10.5, 0),
    ]:
        with subtests.test(mib=mib, unsplit_mib=unsplit_mib):
            assert unsplit_bytes(round(mib * 2**20)) == unsplit_mib * 2**20


def test_projections_of_one_input_are_one_tensor():
    names = {
        fused_name(f"model.layers.3.{name}_proj.weight")
        for name in ("self_attn.q", "self_attn.k", "self_attn.v")
    }

    assert names == {"model.layers.3.self_attn.qkv_proj.weight"}
    assert fused_name("model.layers.3.mlp.gate_proj.weight") == fused_name(
        "model.layers.3.mlp.up_proj.weight"
    )
    assert (
        fused_name("model.layers.3.mlp.down_proj.weight") == "model.layers.3.mlp.down_proj.weight"
    )


def test_published_start_loads_what_its_log_says():
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    }
    shape = read_shape(config)
    parameters = parameters_from_layout(shape, tied=False)

    assert parameters is not None
    assert rank_weights(parameters, shape).fullest_bytes / GIB == pytest.approx(14.25, abs=0.005)


def test_experts_grow_by_their_padding_and_nothing_else_does():
    rows = [
        Parameter("model.layers.0.mlp.experts.gate_up_proj", (8, 128, 64), 131072),
        Parameter("model.layers.0.mlp.down_proj.weight", (64, 128), 16384),
    ]
    plain, padded = (
        rank_weights(rows, SHAPE, expert_padding=ratio).fullest_bytes for ratio in (1.0, 1.5)
    )

    assert padded - plain == 65536


def test_keys_that_stand_for_the_values_are_loaded_as_both():
    config = {
        **LLAMA,
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "sliding_window": 128,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
    }
    shape, keys = read_shape(config), "model.layers.{}.self_attn.k_proj.weight"
    without = rank_weights([], shape).fullest_bytes

    assert (
        rank_weights([Parameter(keys.format(3), (16, 64), 2048)], shape).fullest_bytes
        == without + 4096
    )
    assert (
        rank_weights([Parameter(keys.format(2), (16, 64), 2048)], shape).fullest_bytes
        == without + 2048
    )


def test_layers_with_shared_keys_keep_room_for_their_own():
    config = {**LLAMA, "model_type": "gemma4_text", "num_kv_shared_layers": 1}
    shape, queries = read_shape(config), "model.layers.{}.self_attn.q_proj.weight"
    without, last = rank_weights([], shape).fullest_bytes, shape.layers - 1
    size = 64 * 64 * 2

    held = (
        rank_weights([Parameter(queries.format(last), (64, 64), size)], shape).fullest_bytes
        - without
    )
    assert held == size + size * 2 * shape.kv_heads // shape.heads
    assert (
        rank_weights([Parameter(queries.format(0), (64, 64), size)], shape).fullest_bytes
        == without + size
    )


def test_each_rank_has_the_whole_of_an_indexer():
    wide = [Parameter("model.layers.0.self_attn.indexer.wq_b.weight", (128, 64), 16384)]
    held = rank_weights(wide, SHAPE, tensor_parallel_size=8)
    assert held.fullest_bytes - held.tables_bytes == 16384
