"""LoRA slots: rank by inputs and outputs by rank of every matrix, cut as vLLM cuts them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.weights import around_elements, lora_bytes

UP = Parameter("model.layers.0.mlp.up_proj.weight", (256, 64), 32768)
DOWN = Parameter("model.layers.1.mlp.down_proj.weight", (64, 256), 32768)
EXPERTS = Parameter("model.layers.0.mlp.experts.gate_up_proj", (8, 256, 64), 262144)
NORM = Parameter("model.layers.0.input_layernorm.weight", (64,), 128)
HEAD = Parameter("lm_head.weight", (1000, 64), 128000)


def size(
    *parameters: Parameter, slots: int = 1, rank: int = 16, ranks: int = 1, stages: int = 1
) -> tuple[int, ...]:
    return lora_bytes(
        parameters, 2, stages, slots=slots, rank=rank, tensor_parallel_size=ranks, element_bytes=2
    )


def test_a_matrix_gets_rank_by_inputs_and_outputs_by_rank():
    assert size(UP) == (16 * (64 + 256) * 2,)


def test_of_a_layer_cut_by_its_outputs_a_is_whole():
    assert size(UP, ranks=4) == (16 * (64 + 256 // 4) * 2,)


def test_of_a_layer_cut_by_its_inputs_b_is_whole():
    assert size(DOWN, ranks=4) == (16 * (256 // 4 + 64) * 2,)


def test_each_expert_has_its_own():
    assert size(EXPERTS) == (8 * 16 * (64 + 256) * 2,)


def test_norms_embeddings_and_the_head_have_none():
    assert size(NORM, HEAD) == (0,)


def test_embedding_is_on_the_first_stage_and_head_on_the_last():
    around = {
        "slots": 3,
        "rank": 8,
        "tensor_parallel_size": 4,
        "element_bytes": 2,
        "around_elements": 1000 + 64,
    }
    assert lora_bytes((NORM, HEAD), 2, 2, **around) == (3 * 8 * 1064 * 2, 3 * 8 * 1064 * 2)
    assert lora_bytes((NORM, HEAD), 2, 1, **around) == (2 * 3 * 8 * 1064 * 2,)


def test_only_some_families_adapt_what_is_around_their_layers(subtests):
    for family, adapted in [("llama", 1064), ("qwen3", 1064), ("qwen2", 0)]:
        with subtests.test(family=family, adapted=adapted):
            sizes = {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "vocab_size": 1000,
            }
            assert around_elements(read_shape({"model_type": family, **sizes})) == adapted


def test_a_stage_pays_for_its_own_layers():
    assert size(UP, DOWN, stages=2) == (size(UP)[0], size(DOWN)[0])


@given(st.integers(1, 64), st.sampled_from([1, 8, 16, 32, 64]))
def test_it_grows_with_slots_and_rank(slots, rank):
    assert size(UP, DOWN, slots=slots, rank=rank)[0] == slots * rank * size(UP, DOWN, rank=1)[0]
