"""Layers that predict further tokens, from the configuration alone: each as large as the decoder's last one."""

from __future__ import annotations

import json

import pytest

from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import read_model

CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'


@pytest.fixture
def model(tmp_path):
    def read(layers, speculation=MTP):
        (tmp_path / "config.json").write_text(
            json.dumps({**CONFIG, "num_nextn_predict_layers": layers})
        )
        return read_model(find_model(str(tmp_path)), speculative_config=speculation)

    return read


def of_layer(found, index):
    return sum(p.bytes for p in found.parameters if f".layers.{index}." in p.name)


def test_a_layer_is_the_last_one_beside_its_projection(model):
    found = model(1)
    assert of_layer(found, 2) == of_layer(found, 1) + 64 * 128 * 2


def test_none_is_counted_without_speculation_by_such_layers(subtests, model):
    for layers, speculation in [
        (1, None),
        (0, MTP),
        (1, '{"method": "ngram", "num_speculative_tokens": 1}'),
    ]:
        with subtests.test(layers=layers, speculation=speculation):
            assert of_layer(model(layers, speculation), 2) == 0
