"""What a configuration counts is looked at before transformers makes one thing after the other of it."""

from __future__ import annotations

import pytest

from oomguard.core.errors import ConfigError
from oomguard.estimate.model.parameters import auto_config, is_buildable

LARGEST = {
    "num_hidden_layers": 61,
    "n_routed_experts": 384,
    "hidden_size": 16384,
    "vocab_size": 256_000,
    "max_position_embeddings": 10_485_760,
    "rope_theta": 10**10,
    "num_attention_heads": 128,
    "n_positions": 131_072,
    "vision_config": {
        "depth": 48,
        "image_size": 1344,
        "max_pixels": 12_845_056,
        "num_patches": 9216,
    },
    "time_step_limit": [0.0, float("inf")],
}


def test_the_largest_models_are_built():
    assert is_buildable(LARGEST)


def test_counts_that_would_never_end_are_not(subtests):
    for absurd in [
        {"num_hidden_layers": 10**12},
        {"num_experts": 10**6},
        {"num_hidden_layers": 1000, "num_experts": 1000},
        {"vision_config": {"depth": 10**9}},
        {"vision_config": {"depths": [2, 10**9]}},
        {"decoder": {"encoder_layers": 10**7}},
        {"anything": 10**15},
        {"anything": -(10**400)},
    ]:
        with subtests.test(absurd=absurd):
            assert not is_buildable({**LARGEST, **absurd})
            with pytest.raises(ConfigError, match="larger than any model's"):
                auto_config({"model_type": "llama", **absurd})
