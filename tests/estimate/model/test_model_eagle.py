"""The parameters of an EAGLE head by its configuration: less than the decoder that it reads as, and more."""

from __future__ import annotations

import json
from pathlib import Path

from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import eagle_parameters, read_model
from oomguard.estimate.model.shape import read_shape

HEAD = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "draft_vocab_size": 200,
    "torch_dtype": "bfloat16",
}


def shapes(method: str, **changes: object) -> dict[str, tuple[int, ...]]:
    config = {**HEAD, **changes}
    parameters = read_model(ModelFiles("head", "config.json", config, None)).parameters
    return {p.name: p.shape for p in eagle_parameters(parameters, read_shape(config), method)}


def test_the_embedding_is_the_target_s():
    assert not any("embed_tokens" in name for name in (*shapes("eagle"), *shapes("eagle3")))


def test_eagle_3_has_its_own_head_and_reads_three_states():
    found = shapes("eagle3", target_hidden_size=96)

    assert found["lm_head.weight"] == (200, 64)
    assert found["model.fc.weight"] == (64, 3 * 96)
    assert found["model.layers.0.self_attn.q_proj.weight"] == (64, 2 * 64)
    assert found["model.layers.0.self_attn.k_proj.weight"] == (32, 2 * 64)
    assert found["model.layers.0.self_attn.o_proj.weight"] == (64, 64)


def test_eagle_uses_the_targets_head_and_reads_one_state():
    found = shapes("eagle")

    assert "lm_head.weight" not in found
    assert found["model.fc.weight"] == (64, 2 * 64)
    assert found["model.layers.0.self_attn.q_proj.weight"] == (64, 64)


def test_a_target_is_read_with_its_head_as_it_is_loaded(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    said = json.dumps({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3})
    target = ModelFiles("target", "config.json", {**HEAD, "num_hidden_layers": 2}, None)

    draft = read_model(target, speculative_config=said).draft

    assert draft is not None
    assert {p.name: p.shape for p in draft.parameters} == shapes("eagle3")
