"""A vision encoder's parameters by its model's type, held against what a start printed."""

from __future__ import annotations

import pytest

from oomguard.core.facts import GIB
from oomguard.estimate.model.parameters import parameters_from_layout
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.weights import rank_weights

INTERNVL3 = {
    "model_type": "internvl_chat",
    "torch_dtype": "bfloat16",
    "downsample_ratio": 0.5,
    "llm_config": {
        "model_type": "qwen2",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 151674,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "num_hidden_layers": 45,
        "num_attention_heads": 25,
        "image_size": 448,
        "patch_size": 14,
        "qk_normalization": True,
        "qkv_bias": False,
    },
}


def test_encoder_with_undivided_heads_is_on_each_rank():
    """21.67 GiB on each of eight ranks: 25 heads of attention whole, the MLP shared."""
    shape = read_shape(INTERNVL3)
    parameters = parameters_from_layout(shape, tied=False)

    assert parameters is not None
    found = rank_weights(parameters, shape, tensor_parallel_size=8)
    assert found.fullest_bytes / GIB == pytest.approx(21.67, rel=0.005)


def test_without_a_number_nothing_is_laid_out(subtests):
    for missing in ["image_size", "num_hidden_layers"]:
        with subtests.test(missing=missing):
            vision = {
                name: value for name, value in INTERNVL3["vision_config"].items() if name != missing
            }
            assert (
                parameters_from_layout(
                    read_shape({**INTERNVL3, "vision_config": vision}), tied=False
                )
                is None
            )


DOTS_OCR = {
    "model_type": "dots_ocr",
    "torch_dtype": "bfloat16",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "vision_config": {
        "embed_dim": 1536,
        "hidden_size": 1536,
        "intermediate_size": 4224,
        "num_hidden_layers": 42,
        "num_attention_heads": 12,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "use_bias": False,
    },
}


def test_tower_above_a_third_of_its_model_is_laid_out():
    """5.72 GiB were printed on an RTX 3090."""
    shape = read_shape(DOTS_OCR)
    parameters = parameters_from_layout(shape, tied=False)

    assert parameters is not None
    assert rank_weights(
        parameters, shape, tensor_parallel_size=1
    ).fullest_bytes / GIB == pytest.approx(5.72, rel=0.005)
