"""Layouts: the parameters of a type from its configuration alone, equal to those that transformers builds."""

from __future__ import annotations

import pytest

from oomguard.estimate.model import layouts
from oomguard.estimate.model.layouts import parameters_from_layout
from oomguard.estimate.model.parameters import build_on_meta, is_tied
from oomguard.estimate.model.shape import read_shape

# transformers does not know dots.ocr, whose decoder is Qwen2's.
TYPES = sorted(set(layouts._layouts()) - {"dots_ocr"})
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
                for row in layouts._layouts()[kind].get("where", ())
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
        ("by layer", config_of("glm4_moe", mlp_layer_types=["dense", "sparse", "sparse"])),
        ("type", config_of("a_type_of_tomorrow")),
        ("encoder", config_of("llama", vision_config={"hidden_size": 8})),
    ]:
        with subtests.test(name):
            assert parameters_from_layout(read_shape(config), tied=False) is None


def test_each_type_stands_in_one_layout_and_each_block_in_some():
    tables = layouts._tables()
    types = [kind for layout in tables["layouts"] for kind in layout["types"]]
    used = {
        name
        for layout in tables["layouts"]
        for part in (layout, *layout.get("where", ()))
        for key in ("layer", "dense", "sparse", "around", "blocks", "otherwise")
        for name in part.get(key, ())
    }

    assert len(types) == len(set(types))
    assert used == set(tables["blocks"])
