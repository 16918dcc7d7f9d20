"""The parameters of a model as transformers builds them, without a byte of them."""

from __future__ import annotations

import pytest

from oomguard.estimate.model.parameters import build_on_meta
from oomguard.estimate.model.shape import read_shape

TEXT = {
    "model_type": "qwen2_5_omni_text",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
VISION = {
    "depth": 1,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 128,
    "out_hidden_size": 64,
}
AUDIO = {
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "output_dim": 64,
}


def test_speaking_model_builds_only_its_thinker_and_encoders():
    pytest.importorskip("transformers")
    thinker = {"text_config": TEXT, "vision_config": VISION, "audio_config": AUDIO}

    found = build_on_meta(read_shape({"model_type": "qwen2_5_omni", "thinker_config": thinker}))

    assert found is not None
    parts = {
        name.split(".")[1]
        for name in (parameter.name for parameter in found)
        if name.startswith("model.")
    }
    assert parts == {"language_model", "visual", "audio_tower"}
