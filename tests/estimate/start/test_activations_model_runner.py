"""Which model runner starts a model: the second for dense models first, for all of them later."""

from __future__ import annotations

from packaging.version import Version

from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.activations import model_runner

DENSE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}
EXPERTS = {**DENSE, "model_type": "mixtral", "num_local_experts": 8}
HYBRID = {**DENSE, "model_type": "qwen3_next"}
IMAGES = {"model_type": "llava", "text_config": DENSE}


def test_the_runner_follows_version_and_model(subtests):
    for config, version, runner in [
        (DENSE, "0.22", 1),
        ({**DENSE, "model_type": "qwen3"}, "0.22", 2),
        (DENSE, "0.23", 2),
        ({**DENSE, "quantization_config": {"quant_method": "awq"}}, "0.23", 1),
        ({**DENSE, "model_type": "gemma2"}, "0.24", 1),
        ({**DENSE, "model_type": "gemma2"}, "0.25", 2),
        (DENSE, "0.26.1", 2),
        (EXPERTS, "0.26.1", 1),
        (HYBRID, "0.29", 1),
        (IMAGES, "0.29", 1),
        (EXPERTS, "0.30", 2),
        (HYBRID, "0.30", 2),
        (IMAGES, "0.33", 2),
    ]:
        with subtests.test(config=config, version=version, runner=runner):
            assert model_runner(Version(version), read_shape(config)) == runner
