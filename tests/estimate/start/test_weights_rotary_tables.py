"""Tables of cosines and sines: positions by dimensions, as many of them as there are kinds of positions."""

from __future__ import annotations

from oomguard.estimate.model.shape import read_shape
from oomguard.estimate.start.weights import rotary_bytes

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 256,
}
BY_KIND = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default"},
}


def test_a_table_is_positions_by_dimensions(subtests):
    for changes, rows, columns in [
        ({}, 256, 8),
        ({"partial_rotary_factor": 0.5}, 256, 4),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
            1024,
            8,
        ),
        ({"rope_local_base_freq": 10000.0}, 512, 8),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 1024, 8),
        ({"model_type": "gpt2"}, 0, 8),
        ({"max_position_embeddings": None}, 0, 8),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, 1024, 8),
        ({"rope_parameters": {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}, 1024, 4),
    ]:
        with subtests.test(changes=changes, rows=rows, columns=columns):
            assert rotary_bytes(read_shape({**LLAMA, **changes})) == rows * columns * 2


def test_layers_of_two_kinds_have_a_table_each():
    gemma = {
        **LLAMA,
        "model_type": "gemma4_text",
        "global_head_dim": 16,
        "rope_parameters": BY_KIND,
    }
    assert rotary_bytes(read_shape(gemma)) == 256 * (16 + 8) * 2


def test_gemma_3_has_a_stretched_and_a_plain_rope_table():
    """8.58 GiB of a Gemma 3 4B: half a GiB are the stretched table."""
    linear = {"rope_type": "linear", "factor": 8.0}
    text = {**LLAMA, "model_type": "gemma3_text"}
    old = {**text, "rope_local_base_freq": 10000.0, "rope_scaling": linear}
    new = {
        **text,
        "rope_parameters": {
            "full_attention": linear,
            "sliding_attention": {"rope_type": "default"},
        },
    }

    for part in (old, new):
        assert (
            rotary_bytes(read_shape({"model_type": "gemma3", "text_config": part}))
            == (8 + 1) * 256 * 8 * 2
        )
