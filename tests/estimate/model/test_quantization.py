"""Bytes of quantised weights by method, where only the configuration tells of it."""

from __future__ import annotations

import pytest

from oomguard.core.errors import ConfigError, SettingError
from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.quantization import (
    quantize_parameters,
    quantizes_cache,
    quantizes_mtp,
    size_loaded_parameters,
    unread_quantization,
)
from oomguard.estimate.model.shape import read_shape

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "vocab_size": 128,
}
MATRIX = Parameter("model.layers.0.mlp.up_proj.weight", (128, 128), 32768)
NORM = Parameter("model.layers.0.input_layernorm.weight", (128,), 256)
EMBEDDING = Parameter("model.embed_tokens.weight", (128, 128), 32768)
ROUTER = Parameter("model.layers.0.mlp.gate.weight", (8, 128), 2048)
EXPERT = Parameter("model.layers.0.mlp.experts.3.up_proj.weight", (128, 128), 32768)


def sizes(
    config: dict | None,
    *parameters: Parameter,
    asked: str | None = None,
    notes: list[str] | None = None,
) -> list[int]:
    shape = read_shape({**LLAMA, "quantization_config": config})
    return [
        p.bytes
        for p in quantize_parameters(parameters, shape, asked, [] if notes is None else notes)
    ]


def test_a_matrix_takes_its_bits_and_its_share_of_scales(subtests):
    for config, bits in [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        (
            {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
            },
            4 + 8 / 64 + 32 / 16384,
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 128}}},
            },
            4 + 16 / 128,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8}}},
            },
            8,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
    ]:
        with subtests.test(config=config, bits=bits):
            assert sizes(config, MATRIX) == [round(128 * 128 * bits / 8)]


def test_norms_embeddings_and_routers_stay_as_they_are():
    assert sizes({"quant_method": "fp8"}, NORM, EMBEDDING, ROUTER) == [256, 32768, 2048]


def test_microscaling_takes_the_experts_only():
    assert sizes({"quant_method": "mxfp4"}, MATRIX, EXPERT) == [32768, round(128 * 128 * 4.25 / 8)]


def test_what_the_checkpoint_leaves_alone_is_left_alone(subtests):
    for pattern in ["model.layers.0.mlp.up_proj", "up_proj", r"re:.*up_proj$"]:
        with subtests.test(pattern=pattern):
            assert sizes({"quant_method": "fp8", "ignore": [pattern, "re:("]}, MATRIX) == [32768]


def test_encoder_stays_whole_next_to_quantized_modules(subtests):
    for method in ["awq", "gptq", "auto-round"]:
        with subtests.test(method=method):
            encoder = Parameter("visual.blocks.0.mlp.fc1.weight", (128, 128), 32768)
            assert sizes(
                {"quant_method": method, "bits": 4, "group_size": 128}, encoder, MATRIX
            ) == [32768, 8512]


def test_a_method_nobody_knows_is_an_upper_bound_and_said():
    notes: list[str] = []
    assert sizes({"quant_method": "no such"}, MATRIX, notes=notes) == [32768]
    assert "unknown quantization method 'no such'" in notes[0]


def test_fp8_while_loading_halves_the_matrices():
    assert sizes(None, MATRIX, EMBEDDING, asked="fp8") == [16384, 32768]


def test_a_method_that_needs_its_own_checkpoint_is_refused():
    with pytest.raises(SettingError, match="needs a checkpoint"):
        sizes(None, MATRIX, asked="awq")


def test_an_absurd_quantization_is_named(subtests):
    for config in [{"quant_method": "awq", "bits": "four"}, {"quant_method": "compressed-tensors"}]:
        with subtests.test(config=config), pytest.raises(ConfigError, match="quantization_config"):
            sizes(config, MATRIX)


PACKED = Parameter("model.layers.0.mlp.up_proj.qweight", (16, 128), 8192, floating=False)


def test_packed_tensors_of_a_file_are_not_quantised_again():
    shape = read_shape({**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}})
    assert size_loaded_parameters([PACKED], shape, "awq", []) == (PACKED,)


def test_another_method_than_the_checkpoint_s_is_refused():
    shape = read_shape({**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}})
    for read in (size_loaded_parameters, quantize_parameters):
        with pytest.raises(SettingError, match="'fp8', but the checkpoint uses 'awq'"):
            read([PACKED], shape, "fp8", [])


def test_plain_tensors_are_loaded_in_the_engine_s_data_type():
    single = Parameter("model.layers.0.mlp.up_proj.weight", (128, 128), 65536)
    assert [p.bytes for p in size_loaded_parameters([single], read_shape(LLAMA), None, [])] == [
        32768
    ]


def test_a_module_that_holds_the_matrix_leaves_it_alone_too(subtests):
    for pattern in ["model.layers.*.mlp*", "model.layers.0", "mlp"]:
        with subtests.test(pattern=pattern):
            assert sizes(
                {"quant_method": "awq", "bits": 4, "modules_to_not_convert": [pattern]}, MATRIX
            ) == [32768]


def test_experts_in_eight_bits_leave_the_rest_alone():
    assert sizes(None, MATRIX, EXPERT, asked="experts_int8") == [32768, 16384]


def test_a_checkpoint_may_want_its_keys_and_values_in_eight_bits(subtests):
    for config, wanted in [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, True),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, True),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, False),
    ]:
        with subtests.test(config=config, wanted=wanted):
            assert quantizes_cache(read_shape({**LLAMA, "quantization_config": config})) is wanted


def test_named_module_groups_have_their_own_bits():
    groups = {
        "group_0": {
            "targets": ["model.language_model.layers.0.mlp.up_proj"],
            "weights": {"num_bits": 8, "type": "float"},
        },
        "group_1": {
            "targets": ["model.language_model.layers.0.mlp.experts"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
        },
    }
    other = Parameter("model.layers.0.self_attn.o_proj.weight", (128, 128), 32768)
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "config_groups": groups}

    assert sizes(config, MATRIX, EXPERT, other) == [16384, 16384 * 4.5 / 8, 32768]


def test_linear_layer_group_covers_modules_outside_groups():
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {
            "targets": ["re:.*experts.*"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
        },
    }

    found = sizes({"quant_method": "compressed-tensors", "config_groups": groups}, MATRIX, EXPERT)

    assert found == [16384, 16384 * 4.5 / 8]


def test_experts_may_have_another_type_than_the_rest():
    shape = read_shape(
        {**LLAMA, "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}}
    )

    assert [p.bytes for p in quantize_parameters([MATRIX, EXPERT], shape, None, [])] == [
        16384,
        16384 * 4.25 / 8,
    ]


HEAD = Parameter("lm_head.weight", (128, 128), 32768)
WHOLE, NVFP4, FP8 = 32768, 128 * 128 * 4.5 / 8, 16384


def test_a_checkpoint_of_several_formats_names_each_module_s_own():
    layers = {
        "lm_head": {"quant_algo": "W4A16_NVFP4"},
        "model.language_model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
    }
    other = Parameter("model.layers.0.self_attn.o_proj.weight", (128, 128), WHOLE)
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": ["*v*"],
    }

    assert sizes(config, HEAD, MATRIX, EXPERT, other) == [NVFP4, FP8, NVFP4, WHOLE]


def test_a_head_is_quantised_where_the_checkpoint_says_so(subtests):
    for name, config, head in [
        (
            "left out of the list",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*visual*"]},
            NVFP4,
        ),
        (
            "in the list",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
            WHOLE,
        ),
        ("no list", {"quant_method": "modelopt", "quant_algo": "FP8"}, WHOLE),
        ("said", {"quant_method": "gptq", "bits": 4, "group_size": -1, "lm_head": True}, 8192),
        ("not said", {"quant_method": "gptq", "bits": 4, "group_size": -1}, WHOLE),
        ("fp8", {"quant_method": "fp8", "ignore": ["mlp"]}, WHOLE),
    ]:
        with subtests.test(name):
            assert sizes(config, HEAD) == [head]


def test_a_matrix_of_aqlm_has_its_codes_and_a_codebook():
    config = {
        "quant_method": "aqlm",
        "num_codebooks": 1,
        "nbits_per_codebook": 16,
        "in_group_size": 8,
        "out_group_size": 1,
    }

    assert sizes(config, MATRIX) == [128 * 128 * 2 / 8 + 2**16 * 8 * 2]


def test_mtp_layers_are_quantized_unless_excluded(subtests):
    for name, config, quantised in [
        ("whole", None, True),
        ("all", {"quant_method": "fp8"}, True),
        ("glob", {"quant_method": "modelopt", "ignore": ["*mtp*"]}, False),
        ("pattern", {"quant_method": "compressed-tensors", "ignore": ["re:.*mtp.*"]}, False),
        (
            "layer behind the last",
            {"quant_method": "modelopt", "exclude_modules": ["model.layers.1*"]},
            False,
        ),
        (
            "named formats",
            {
                "quant_method": "modelopt",
                "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}},
            },
            False,
        ),
    ]:
        with subtests.test(name):
            assert quantizes_mtp(read_shape({**LLAMA, "quantization_config": config})) is quantised


def test_a_format_of_unknown_bits_is_named():
    for config, unread in [
        ({"quant_method": "of_tomorrow"}, ("quant_method 'of_tomorrow'",)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ()),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            ("quant_algo 'MIXED_PRECISION' without quantized_layers",),
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"layers.0.mlp": {"quant_algo": "W3"}},
            },
            ("quant_algo 'W3'",),
        ),
    ]:
        shape = read_shape({**LLAMA, "quantization_config": config})
        assert unread_quantization(shape) == unread
