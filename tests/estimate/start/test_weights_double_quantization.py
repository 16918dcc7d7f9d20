"""Scales of bitsandbytes: quantised once more in early versions, unpacked in later ones."""

from __future__ import annotations

from packaging.version import Version

from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.start.weights import with_scales_of_version

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 1000,
}
METHOD = {"quant_method": "bitsandbytes", "load_in_4bit": True}
DOUBLE, PLAIN = 4 + 8 / 64 + 32 / 16384, 4.5


def test_a_version_keeps_or_unpacks_scales_that_were_quantised(subtests):
    for name, version, config, asked, bits in [
        ("made early", "0.8.5", None, "bitsandbytes", DOUBLE),
        ("made late", "0.9", None, "bitsandbytes", PLAIN),
        ("read early", "0.8.5", {**METHOD, "bnb_4bit_use_double_quant": True}, None, DOUBLE),
        ("read late", "0.9", {**METHOD, "bnb_4bit_use_double_quant": True}, None, PLAIN),
        ("plain", "0.8.5", METHOD, None, PLAIN),
    ]:
        with subtests.test(name):
            files = ModelFiles(
                "a model", "config.json", {**CONFIG, "quantization_config": config}, None
            )

            model = with_scales_of_version(
                read_model(files, quantization=asked), Version(version), asked
            )

            (matrix,) = (
                p for p in model.parameters if p.name == "model.layers.0.mlp.up_proj.weight"
            )
            assert matrix.bytes == round(matrix.elements * bits / 8)


def test_other_weights_stay_as_they_are():
    model = read_model(ModelFiles("a model", "config.json", CONFIG, None))

    assert with_scales_of_version(model, Version("0.8"), None) is model
