"""A configuration beside weights of another model: refused, with both numbers."""

from __future__ import annotations

import pytest

from oomguard.core.errors import ConfigError
from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.model import check_headers
from oomguard.estimate.model.shape import read_shape

SHAPE = read_shape(
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "num_nextn_predict_layers": 1,
    }
)


def headers(rows=1000, width=64, layers=2, prefix="model."):
    table = Parameter(f"{prefix}embed_tokens.weight", (rows, width), rows * width * 2)
    own = [
        Parameter(f"{prefix}layers.{n}.mlp.up_proj.weight", (128, width), 256 * width)
        for n in range(layers)
    ]
    return [table, *own, Parameter("visual.layers.9.weight", (4, 4), 32)]


def test_padded_tables_and_draft_layers_belong_to_the_model(subtests):
    for fields in [
        {},
        {"rows": 1024},
        {"layers": 3},
        {"layers": 0},
        {"prefix": "model.language_model."},
        {"prefix": "language_model.model."},
    ]:
        with subtests.test(fields=fields):
            check_headers(headers(**fields), SHAPE, "config.json")


def test_weights_of_another_model_are_refused_with_both_numbers(subtests):
    for fields, said in [
        (
            {"width": 32},
            "hidden_size 64, but the weight headers have model.embed_tokens.weight with 1000 by 32 elements",
        ),
        ({"rows": 2000}, "vocab_size is 1000"),
        ({"layers": 1}, "num_hidden_layers is 2, but the weight headers have 1 layers"),
        ({"layers": 5}, "the weight headers have 5 layers"),
    ]:
        with subtests.test(fields=fields, said=said):
            with pytest.raises(ConfigError, match=r"config\.json") as refused:
                check_headers(headers(**fields), SHAPE, "config.json")
            assert said in str(refused.value)
