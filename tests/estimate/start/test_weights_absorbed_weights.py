"""Products of latent attention's weights that early versions keep, held against published starts."""

from __future__ import annotations

import pytest
from packaging.version import Version

from oomguard.core.facts import GIB
from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.weights import absorbed_bytes

LITE = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
R1 = LITE | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "quantization_config": {"quant_method": "fp8"},
}


def test_published_weights_of_0_7_are_met_with_them(subtests):
    for config, layers, gib in [(LITE, 27, 3.97 - 3.73), (R1, 61, 83.88 - 79.31)]:
        with subtests.test(config=config, layers=layers, gib=gib):
            found = absorbed_bytes(read_shape(config), Version("0.7.3"), ranks=8, layers=layers)
            assert found / GIB == pytest.approx(gib, rel=0.05, abs=0.02)


def test_before_them_there_was_nothing():
    assert absorbed_bytes(read_shape(R1), Version("0.7.0"), ranks=8, layers=61) == 0


def test_later_versions_keep_one_fp8_projection_in_half(subtests):
    """79.74 GiB were printed for DeepSeek-R1 on eight H200 with 0.11.2, of which its parameters are 79.31."""
    for version in ["0.8.5", "0.11.2", "0.33.0"]:
        with subtests.test(version=version):
            found = absorbed_bytes(read_shape(R1), Version(version), ranks=8, layers=61)
            assert found == 61 * 16 * 512 * (128 + 128) * 2
            assert absorbed_bytes(read_shape(LITE), Version(version), ranks=8, layers=27) == 0


def test_other_models_have_none():
    plain = {name: value for name, value in LITE.items() if not name.endswith(("rank", "dim"))} | {
        "model_type": "llama"
    }
    assert absorbed_bytes(read_shape(plain), Version("0.7.3"), ranks=8, layers=27) == 0
