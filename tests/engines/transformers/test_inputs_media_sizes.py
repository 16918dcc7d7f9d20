"""Tokens of images that a call gives the sizes of are as many as the model makes of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.inputs import tokens_by_size  # noqa: E402

SEES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
TEXT = {**SEES, "vocab_size": 64, "num_key_value_heads": 2}
SIZES = torch.tensor([(64, 64), (40, 100), (120, 40), (32, 32)])
TILES = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]], "vision_feature_layer": -1}


def llava_next():
    vision = {**SEES, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
    return transformers.LlavaNextConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, **TILES
    )


def mistral3():
    vision = {**SEES, "model_type": "pixtral", "image_size": 128, "patch_size": 4, "head_dim": 16}
    text = {**TEXT, "model_type": "mistral", "head_dim": 16}
    return transformers.Mistral3Config(text_config=text, vision_config=vision, spatial_merge_size=2)


def test_each_image_has_as_many_tokens_as_its_model_makes_of_it(subtests):
    for config, name, pixels in [
        (llava_next, "LlavaNextForConditionalGeneration", (4, 5, 3, 32, 32)),
        (mistral3, "Mistral3ForConditionalGeneration", (4, 3, 120, 104)),
    ]:
        with subtests.test(config=config, name=name, pixels=pixels):
            model = getattr(transformers, name)(config()).eval()
            with torch.no_grad():
                features = model.get_image_features(torch.zeros(pixels), image_sizes=SIZES)
            made = getattr(features, "pooler_output", features)

            assert tokens_by_size(model, SIZES) == [len(image) for image in made]


def test_a_model_that_counts_them_otherwise_is_not_guessed_at():
    assert tokens_by_size(SimpleNamespace(config=SimpleNamespace()), SIZES) is None
    assert tokens_by_size(SimpleNamespace(config=SimpleNamespace()), torch.tensor([4, 4])) is None
