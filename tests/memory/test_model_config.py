"""Reading a model's shape: only plain decoders, and nothing guessed from what is absurd."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.memory.model_config import ModelConfig, from_mapping, read_model_config

PLAIN = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SHAPE = ModelConfig(32, 4096, 14336, 32, 8, 128, 128256, 2)


def without(name: str) -> dict:
    return {key: value for key, value in PLAIN.items() if key != name}


def test_a_plain_decoder_is_read():
    assert from_mapping(PLAIN) == SHAPE


def test_all_heads_hold_a_cache_where_no_kv_heads_are_named():
    assert from_mapping(without("num_key_value_heads")).kv_heads == 32


def test_a_head_size_of_its_own_is_taken():
    assert from_mapping({**PLAIN, "head_dim": 256}).head_dim == 256


@pytest.mark.parametrize(("name", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2), ("torch.float16", 2)])
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_size_of_an_element_follows_from_the_dtype(key, name, size):
    assert from_mapping({**without("torch_dtype"), key: name}).dtype_bytes == size


def test_a_dtype_that_is_not_known_is_not_guessed():
    assert from_mapping({**PLAIN, "torch_dtype": "float8_e4m3fn"}) is None


@pytest.mark.parametrize(
    "extra",
    [
        {"kv_lora_rank": 512},
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["linear_attention"]},
        {"layer_types": ["full_attention"], "kv_lora_rank": 512},
        {"sliding_window_pattern": 6},
        {"mamba_d_state": 16},
        {"ssm_state_size": 128},
        {"text_config": {"hidden_size": 1}},
    ],
    ids=str,
)
def test_what_is_no_plain_decoder_is_unknown(extra):
    assert from_mapping({**PLAIN, **extra}) is None


@pytest.mark.parametrize(
    "extra",
    [
        {"layer_types": ["full_attention"] * 32},
        {"sliding_window": None},
        {"sliding_window": 131072, "use_sliding_window": False},
        {"sliding_window": 131072, "use_sliding_window": False, "layer_types": ["full_attention"] * 32},
        {"kv_lora_rank": None, "text_config": None},
        {"rope_theta": 1e6, "quantization_config": {"bits": 4}},
    ],
    ids=str,
)
def test_full_attention_in_every_layer_is_plain(extra):
    assert from_mapping({**PLAIN, **extra}) == SHAPE


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", ["missing", None, 0, -1, "32", 32.0, [32], {}])
def test_a_missing_or_absurd_number_is_unknown(name, value):
    assert from_mapping(without(name) if value == "missing" else {**PLAIN, name: value}) is None


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [-1, "8", 8.0])
def test_an_absurd_optional_number_is_unknown(name, value):
    assert from_mapping({**PLAIN, name: value}) is None


def test_a_yes_is_no_number():
    assert from_mapping({**PLAIN, "num_hidden_layers": True}) is None


@pytest.mark.parametrize("value", [3, [["full_attention"]], [{}]], ids=repr)
def test_layer_types_that_are_no_texts_are_unknown(value):
    assert from_mapping({**PLAIN, "layer_types": value}) is None


def test_a_local_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))

    assert read_model_config(str(tmp_path)) == SHAPE


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{}"])
def test_an_unreadable_configuration_is_unknown(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)

    assert read_model_config(str(tmp_path)) is None


def test_a_hub_name_or_a_missing_folder_is_unknown(tmp_path):
    assert read_model_config("no-such-org/no-such-model") is None
    assert read_model_config(str(tmp_path)) is None
    assert read_model_config("a\0b") is None


def test_a_deeply_nested_configuration_is_unknown(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)

    assert read_model_config(str(tmp_path)) is None


# No booleans and no layer_types here: both have a test of their own above.
leaves = st.none() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*PLAIN, "head_dim", "sliding_window", "kv_lora_rank", "text_config"]), leaves))
def test_any_configuration_is_a_positive_shape_or_unknown(changes):
    shape = from_mapping({**PLAIN, **changes})

    assert shape is None or all(getattr(shape, name) > 0 for name in ModelConfig.__slots__)
