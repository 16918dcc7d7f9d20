"""Any family's configuration is read under its own names; what is missing or absurd is named, never guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.errors import ConfigError
from oomguard.estimate.model.shape import read_shape

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


def test_a_plain_decoder_is_read():
    shape = read_shape(LLAMA)

    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim) == (
        32,
        4096,
        32,
        8,
        128,
    )
    assert (shape.vocab, shape.dtype_bytes, shape.max_positions) == (128256, 2, 131072)


def test_each_family_is_read_under_its_own_names(subtests):
    for config, numbers in [
        (
            {
                "model_type": "gpt2",
                "n_layer": 12,
                "n_embd": 768,
                "n_head": 12,
                "vocab_size": 50257,
                "n_positions": 1024,
            },
            (12, 768, 12, 12, 64),
        ),
        (
            {
                "model_type": "mpt",
                "n_layers": 2,
                "d_model": 64,
                "n_heads": 4,
                "vocab_size": 9,
                "attn_config": {"kv_n_heads": 1},
            },
            (2, 64, 4, 1, 16),
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 2,
                "hidden_size": 4544,
                "num_attention_heads": 71,
                "vocab_size": 9,
            },
            (2, 4544, 71, 1, 64),
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 2,
                "hidden_size": 8192,
                "num_attention_heads": 128,
                "num_kv_heads": 8,
                "new_decoder_architecture": True,
                "vocab_size": 9,
            },
            (2, 8192, 128, 8, 64),
        ),
        (
            {"model_type": "gpt_bigcode", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 9},
            (2, 64, 4, 1, 16),
        ),
        (
            {
                "model_type": "chatglm",
                "num_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "padded_vocab_size": 9,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "kv_channels": 16,
            },
            (2, 64, 4, 2, 16),
        ),
    ]:
        with subtests.test(config=config, numbers=numbers):
            shape = read_shape(config)

            assert (
                shape.layers,
                shape.hidden,
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
            ) == numbers


def test_language_part_of_a_multimodal_configuration_counts():
    shape = read_shape(
        {
            "architectures": ["Outer"],
            "model_type": "outer",
            "text_config": {**LLAMA, "architectures": None},
        }
    )

    assert (shape.model_type, shape.layers) == ("llama", 32)


def test_a_missing_or_absurd_field_is_named_with_the_file(subtests):
    for name in ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]:
        for value in [None, 0, -1, 1.5, "32", True, 10**12, [1]]:
            with subtests.test(name=name, value=value):
                with pytest.raises(ConfigError, match=rf"^model/config.json: {name} ") as caught:
                    read_shape({**LLAMA, name: value}, "model/config.json")
                assert caught.value.path == "model/config.json"


def test_a_head_size_that_does_not_follow_is_asked_for():
    with pytest.raises(ConfigError, match="head_dim is missing"):
        read_shape({**LLAMA, "hidden_size": 4097})


def test_latent_attention_needs_no_head_dim():
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
    heads = {"num_attention_heads": 20, "num_key_value_heads": 20}
    shape = read_shape({**LLAMA, **latent, **heads, "hidden_size": 2048})

    assert shape.head_dim == 64


def test_activations_are_in_half_precision_as_vllm_loads_them(subtests):
    for dtype, size in [
        ("float16", 2),
        ("torch.bfloat16", 2),
        ("float32", 2),
        ("fp8", 2),
        (None, 2),
    ]:
        with subtests.test(dtype=dtype, size=size):
            assert read_shape({**LLAMA, "torch_dtype": dtype}).dtype_bytes == size


@given(
    st.dictionaries(
        st.sampled_from(sorted(LLAMA)),
        st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers())),
    )
)
def test_a_damaged_configuration_is_read_or_refused_by_name(damage):
    try:
        read = read_shape({**LLAMA, **damage})
    except ConfigError as error:
        message = str(error)
    else:
        message = f"config.json: {read.layers} layers"
    assert message.startswith("config.json: ")


def test_the_longest_request_follows_vllm_s_own_rules(subtests):
    for changes, longest, default in [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4 * 131072, 4 * 131072),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072, 131072),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                }
            },
            131072,
            131072,
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 3.0,
                    "original_max_position_embeddings": 262144,
                }
            },
            786432,
            786432,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 3.0}}, 131072, 131072),
        (
            {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096},
            131072,
            4096,
        ),
        ({"model_max_length": 262144}, 262144, 262144),
        ({"n_positions": 1024}, 1024, 1024),
        ({"max_position_embeddings": None}, None, None),
        ({"rope_scaling": {"type": ["linear"], "factor": float("nan")}}, 131072, 131072),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, 131072, 131072),
    ]:
        with subtests.test(changes=changes, longest=longest, default=default):
            shape = read_shape({**LLAMA, **changes})
            assert (shape.max_positions, shape.default_length) == (longest, default)


def test_of_a_list_by_layer_the_largest_counts():
    assert read_shape({**LLAMA, "intermediate_size": [8, 64, 16]}).number("intermediate_size") == 64


def test_more_layers_than_any_model_has_are_refused_at_once():
    with pytest.raises(ConfigError, match="but oomguard reads at most"):
        read_shape({**LLAMA, "num_hidden_layers": 10**9})


def test_an_absurd_value_is_not_printed_whole():
    with pytest.raises(ConfigError) as caught:
        read_shape({**LLAMA, "vocab_size": "x" * 10_000})
    assert len(str(caught.value)) < 200
