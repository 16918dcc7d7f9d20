"""The parameters of a model as transformers builds them, without a byte of them."""

from __future__ import annotations

import pytest

from oomguard.estimate.model import parameters
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


def test_transformers_builds_a_model_once(tmp_path, monkeypatch, caplog):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {**TEXT, "model_type": "qwen3", "torch_dtype": "float16"}

    first = build_on_meta(read_shape(config))
    monkeypatch.setattr(parameters, "_build", lambda _: pytest.fail("built again"))

    assert build_on_meta(read_shape(config)) == first
    assert "later plans read them from the cache" in caplog.text


def test_another_configuration_is_built_anew(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {**TEXT, "model_type": "qwen3"}

    small, large = (
        build_on_meta(read_shape({**config, "vocab_size": size})) for size in (256, 512)
    )

    assert small is not None
    assert large is not None
    assert sum(p.elements for p in large) > sum(p.elements for p in small)


def test_a_model_that_transformers_rejects_stays_rejected(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = read_shape({**TEXT, "model_type": "no_such_family"})

    assert [build_on_meta(shape), build_on_meta(shape)] == [None, None]
