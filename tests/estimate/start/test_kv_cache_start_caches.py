"""The KV cache of a start by version."""

from __future__ import annotations

from packaging.version import Version

from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.kv_cache import start_caches
from oomguard.estimate.start.start import VllmSettings

HYBRID = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 1000,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
}


def test_a_request_keeps_one_mamba_state_more_from_the_version_that_exports_them(subtests):
    for version, states in [("0.31", 2), ("0.32", 3)]:
        with subtests.test(version=version, states=states):
            model = read_model(ModelFiles("a hybrid", "config.json", HYBRID, None))
            settings = VllmSettings(
                Version(version), 24 << 30, 0.9, max_model_len=2048, enable_prefix_caching=True
            )

            layout = start_caches(model, settings).layout

            (group,) = (group for group in layout.groups if group.kind == "state")
            assert group.request_blocks(layout.settings) == states
