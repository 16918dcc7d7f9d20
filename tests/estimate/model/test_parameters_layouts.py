"""Layouts: the parameters of a type from its configuration alone, equal to those that transformers builds."""

from __future__ import annotations

import pytest

from oomguard.estimate.model import parameters
from oomguard.estimate.model.parameters import build_on_meta, is_tied, parameters_from_layout
from oomguard.estimate.model.shape import read_shape

# Families whose layers differ, or whose numbers have names of their own.
_LAYERS = {"num_hidden_layers": 4, "hidden_size": 48, "vocab_size": 104, "pad_token_id": 0}
_HEADS = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 56,
}
_ROUTED = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
_DELTA = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
}
_MLA = {
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
_MAMBA = {
    "hybrid_override_pattern": "M*-E",
    "mamba_num_heads": 7,
    "mamba_head_dim": 10,
    "n_groups": 1,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 36,
}
_GEMMA4 = {
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
OWN = {
    "qwen3_next": _DELTA | _ROUTED | {"shared_expert_intermediate_size": 36},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _ROUTED | {"shared_expert_intermediate_size": 36},
    "nemotron_h": _MAMBA | _ROUTED,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "head_dim": None},
    "lfm2_moe": _ROUTED
    | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "head_dim": None}
    | {"num_dense_layers": 1},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 36,
        "num_local_experts": 5,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "head_dim": None,
    },
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_rms_norm": True,
    },
    "gemma4_text": _GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4_text with keys as values": _GEMMA4
    | {"attention_k_eq_v": True, "enable_moe_block": True, "top_k_experts": 2}
    | {"num_experts": 5, "moe_intermediate_size": 28},
    "gemma3n_text": _GEMMA4
    | {"altup_num_inputs": 4, "laurel_rank": 8, "num_kv_shared_layers": 2}
    | {"intermediate_size": [56] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "glm_moe_dsa": _MLA
    | {"n_routed_experts": 5, "n_shared_experts": 1, "moe_intermediate_size": 28}
    | {"index_topk": 4, "index_head_dim": 20, "index_n_heads": 3, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 6, "head_dim": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v4": {
        "intermediate_size": None,
        "head_dim": 36,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 28,
        "n_routed_experts": 5,
        "n_shared_experts": 1,
        "q_lora_rank": 14,
        "o_lora_rank": 10,
        "o_groups": 2,
        "qk_rope_head_dim": 8,
        "index_head_dim": 20,
        "index_n_heads": 3,
        "index_topk": 4,
        "compress_ratios": [0, 0, 4, 128],
        "sliding_window": 16,
        "hc_mult": 4,
    },
    "kimi_linear": _MLA
    | {"q_lora_rank": None, "num_key_value_heads": 6, "head_dim": None}
    | {"num_experts": 5, "moe_intermediate_size": 28, "num_shared_experts": 1}
    | {"first_k_dense_replace": 1, "num_experts_per_token": 2}
    | {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 3,
            "head_dim": 20,
            "short_conv_kernel_size": 4,
        }
    },
    "gpt2": {
        "n_positions": 40,
        "n_inner": 56,
        "intermediate_size": None,
        "head_dim": None,
        "num_key_value_heads": None,
    },
    "opt": {"max_position_embeddings": 40, "head_dim": None, "num_key_value_heads": None}
    | {"ffn_dim": 56, "word_embed_proj_dim": 48},
    "phi": {"head_dim": None, "num_key_value_heads": 6},
}
# Models of several parts: their decoder is that of another type, and transformers builds it only with its encoder.
PARTS = {"qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"}
PARTS |= {"qwen3_vl_moe_text", "whisper", "muse_glimmer_text"}
# transformers does not know dots.ocr and Kimi K2, whose decoders are Qwen2's and DeepSeek V3's.
TYPES = sorted(set(parameters._layouts()) - {"dots_ocr", "kimi_k2"} - set(OWN) - PARTS)
# Every number is another one, so that no dimension stands in for a second.
SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 56,
    "vocab_size": 104,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
}
EXPERTS |= {
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
    "n_shared_experts": 2,
    "n_group": 1,
}
EXPERTS |= {"topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}


def config_of(kind: str, **more: object) -> dict[str, object]:
    config: dict[str, object] = {"model_type": kind} | SIZES
    if kind in {"phi3", "olmoe"}:  # they have no field of that name
        del config["head_dim"]
    if "moe" in kind or kind in {"mixtral", "gpt_oss", "minimax_m2", "deepseek_v2", "deepseek_v3"}:
        config |= EXPERTS
    if kind.startswith("deepseek"):
        config |= LATENT | {"num_key_value_heads": 6, "head_dim": 4}
    return config | more


def names_and_shapes(found):
    return sorted((parameter.name, parameter.shape) for parameter in found)


@pytest.mark.torch
def test_a_type_is_laid_out_as_transformers_builds_it(subtests):
    for kind in TYPES:
        with subtests.test(kind=kind):
            said_by = [
                row["field"]
                for row in parameters._layouts()[kind].get("where", ())
                if row["field"] != "q_lora_rank"
            ]
            for more in (
                {},
                {"tie_word_embeddings": True},
                *({name: value} for name in said_by for value in (True, False)),
            ):
                shape = read_shape(config_of(kind, **more))
                found, built = (
                    parameters_from_layout(shape, tied=is_tied(shape)),
                    build_on_meta(shape),
                )

                assert found is not None
                assert built is not None
                assert names_and_shapes(found) == names_and_shapes(built), more
                assert sum(parameter.bytes for parameter in found) == sum(
                    parameter.bytes for parameter in built
                )


@pytest.mark.torch
def test_a_family_with_layers_of_several_kinds_is_laid_out_as_transformers_builds_it(subtests):
    for kind, changes in OWN.items():
        with subtests.test(kind=kind):
            config = {"model_type": kind.split()[0]} | _LAYERS | _HEADS | changes
            given = {name: value for name, value in config.items() if value is not None}
            shape = read_shape(given | {"tie_word_embeddings": False})
            found = parameters_from_layout(shape, tied=False)
            built = build_on_meta(shape)

            assert found is not None
            assert built is not None
            assert names_and_shapes(found) == names_and_shapes(built)


@pytest.mark.torch
def test_a_query_without_a_rank_is_one_matrix():
    shape = read_shape(config_of("deepseek_v2", q_lora_rank=None))

    found, built = parameters_from_layout(shape, tied=is_tied(shape)), build_on_meta(shape)

    assert found is not None
    assert built is not None
    assert names_and_shapes(found) == names_and_shapes(built)


def test_what_a_layout_does_not_hold_is_not_laid_out(subtests):
    for name, config in [
        ("head_dim", config_of("qwen3", head_dim=None)),
        ("width", config_of("llama", intermediate_size=None)),
        ("dense layers", config_of("qwen3_moe", mlp_only_layers=[1])),
        ("step", config_of("qwen3_moe", decoder_sparse_step=2)),
        ("shared", config_of("deepseek_v3", n_shared_experts=None)),
        ("by layer", config_of("glm4_moe", mlp_layer_types=["sparse", "dense", "sparse"])),
        ("type", config_of("a_type_of_tomorrow")),
        ("encoder", config_of("llama", vision_config={"hidden_size": 8})),
    ]:
        with subtests.test(name):
            assert parameters_from_layout(read_shape(config), tied=False) is None


def test_each_type_stands_in_one_layout_and_each_block_in_some():
    tables = parameters._tables()
    types = [kind for layout in tables["layouts"] for kind in layout["types"]]
    used = {
        name
        for layout in tables["layouts"]
        for part in (layout, *layout.get("where", ()), *layout.get("around_where", ()))
        for key in ("layer", "dense", "sparse", "around", "blocks", "otherwise")
        for name in part.get(key, ())
    }
    for layout in tables["layouts"]:
        for blocks in layout.get("kinds", {}).values():
            used |= set(blocks)

    assert len(types) == len(set(types))
    assert used == set(tables["blocks"])
