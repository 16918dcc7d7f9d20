"""Small models with random weights by family, in float32, for generated cases; each kind with the
head that a case asks for.
"""

import tomllib
from pathlib import Path
from typing import Any

# Pixels of a side, and channels of the first layers of a model of sound, where a case says nothing.
IMAGE = 64
CHANNELS = 16
FAMILIES = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "call_families.toml").read_text(encoding="utf-8")
)
LONGEST = 1024
HEADS = 4
SAMPLES_A_TOKEN = 80  # conv_stride below


def sizes(family: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return what a family's configuration is given, by the names that it has for it."""
    import transformers as hf

    hidden = case["hidden"]
    layers = case["layers"]
    heads = HEADS
    plain = {
        "vocab_size": case["vocab"],
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": hidden // heads,
        "max_position_embeddings": LONGEST,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    kind = type(hf.AutoConfig.for_model(family))
    known = set(kind().to_dict()) | set(kind.attribute_map)
    return {name: value for name, value in plain.items() if name in known} | own_sizes(family, case)


def own_sizes(family: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return what a family names otherwise, or needs beside the rest."""
    hidden = case["hidden"]
    layers = case["layers"]
    heads = HEADS
    bart = {
        "d_model": hidden,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 3 * hidden,
        "decoder_ffn_dim": 3 * hidden,
        "max_position_embeddings": LONGEST,
        "decoder_start_token_id": 0,
    }
    t5 = {
        "d_kv": hidden // heads,
        "d_ff": 3 * hidden,
        "num_layers": layers,
        "num_heads": heads,
        "decoder_start_token_id": 0,
    }
    patches = {"image_size": case.get("image", IMAGE), "patch_size": 8}
    stages = {
        "hidden_sizes": [hidden // 4, hidden // 2, hidden // 2, hidden],
        "depths": [1, 1, 1, 1],
    }
    windows = {
        "image_size": case.get("image", IMAGE),
        "embed_dim": hidden // 2,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    speech = {
        "conv_dim": [case.get("channels", CHANNELS)] * 3,
        "conv_stride": [5, 4, 4],
        "conv_kernel": [10, 8, 8],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "vocab_size": 32,
    }
    sliding = {"sliding_window": 64}
    return {
        "gpt2": {"n_positions": LONGEST},
        "gptj": {"rotary_dim": hidden // heads, "n_positions": LONGEST},
        "codegen": {"rotary_dim": hidden // heads, "n_positions": LONGEST},
        "gpt_neo": {
            "attention_types": [[["global", "local"], layers // 2]],
            "window_size": 64,
            "num_layers": layers // 2 * 2,
            "num_heads": heads,
        },
        "opt": {"ffn_dim": 3 * hidden, "word_embed_proj_dim": hidden},
        "xglm": {"num_layers": layers, "attention_heads": heads, "ffn_dim": 3 * hidden},
        "mistral": sliding,
        "gemma2": {**sliding, "query_pre_attn_scalar": hidden // heads},
        "gemma3_text": {**sliding, "query_pre_attn_scalar": hidden // heads},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden},
        **dict.fromkeys(("t5", "mt5", "umt5"), t5),
        **dict.fromkeys(
            ("bart", "mbart", "marian", "pegasus", "blenderbot", "m2m_100", "led"), bart
        ),
        **dict.fromkeys(("vit", "beit", "dinov2"), patches),
        **dict.fromkeys(("convnext", "poolformer"), stages),
        "segformer": {**stages, "num_attention_heads": [1, 2, 2, 4]},
        "resnet": {
            "embedding_size": hidden // 4,
            "hidden_sizes": [hidden // 2, hidden],
            "depths": [1, 1],
        },
        "regnet": {
            "embedding_size": hidden // 4,
            "hidden_sizes": [hidden // 2, hidden],
            "depths": [1, 1],
            "groups_width": 8,
        },
        **dict.fromkeys(("swin", "swinv2"), windows),
        **dict.fromkeys(FAMILIES["speech"], speech),
    }.get(family, {})


def make_model(case: dict[str, Any]) -> Any:
    """Return a case's model, as its family's configuration and the head of its call make it."""
    import torch
    import transformers as hf

    torch.manual_seed(case["number"])
    family = case["family"]
    kind = type(hf.AutoConfig.for_model(family))
    given = sizes(family, case)
    if family in {"convnext", "poolformer", "segformer", "resnet", "regnet", "swin", "swinv2"}:
        given = own_sizes(family, case)
    model = getattr(hf, case["head"]).from_config(kind(**given)).eval()
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model
