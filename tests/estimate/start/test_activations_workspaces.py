"""The buffer that experts and sparse attention work in: the larger of the two."""

from __future__ import annotations

from packaging.version import Version

from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.activations import workspace_bytes

BASE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "intermediate_size": 6144,
    "torch_dtype": "bfloat16",
}
EXPERTS = BASE | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SPARSE = BASE | {"index_head_dim": 128, "index_topk": 2048}


def of(config: dict[str, object], version: str = "0.26", **changes: int) -> int:
    given = {"step_tokens": 8192, "longest_tokens": 163840, "expert_ranks": 1} | changes
    return workspace_bytes(read_shape(config), Version(version), **given)


def test_a_dense_model_has_none():
    assert of(BASE) == 0


def test_each_token_is_there_once_for_each_expert_in_both_halves():
    assert of(EXPERTS) == 8192 * 8 * (2048 + 2048) * 2
    assert of(EXPERTS, "0.11") == 8192 * 8 * (2048 + 768) * 2


def test_shared_experts_have_a_part_of_their_width_on_a_rank():
    wide = EXPERTS | {"moe_intermediate_size": 4096}

    assert of(wide, expert_ranks=4) == 8192 * 8 * (2048 + 2048) * 2
    assert of(wide) == 8192 * 8 * (8192 + 4096) * 2


def test_an_indexer_gathers_the_keys_of_so_many_longest_requests(subtests):
    for version, tokens, requests in [
        ("0.12", 163840, 2),
        ("0.26", 163840, 40),
        ("0.33", 262144, 40),
        ("0.33", 819200, 16),
    ]:
        with subtests.test(version=version, tokens=tokens, requests=requests):
            assert of(SPARSE, version, longest_tokens=tokens) == requests * tokens * (128 + 4)


def test_both_share_one_buffer():
    both = EXPERTS | SPARSE | {"model_type": "glm_moe_dsa"}

    assert of(both) == max(of(EXPERTS), of(SPARSE))


def test_an_indexer_of_compressed_keys_gathers_as_many_fewer():
    assert of(SPARSE | {"compress_ratios": [0, 4, 128]}) == of(SPARSE) // 4
