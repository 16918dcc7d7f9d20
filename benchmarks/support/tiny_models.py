"""Small models with random weights of the classes of transformers, made from their default
configurations.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

# Larger models run under fake tensors only.
MOST_PARAMETERS = 120_000_000
VOCABULARY = 1024
_FIRST_SPECIAL = 900

_LAYERS = re.compile(
    r"^(?!.*(conv|feat|dense|pooler|prenet|postnet|proj|mtp|nextn|kv_shared|wavenet|separable|prompt|attention_l))"
    r"(.*_)?(n|num)_(\w+_)?layers?$|^(encoder|decoder|speech_encoder|t2u_encoder|t2u_decoder)_layers$"
    r"|^(decoder_)?depth$|^[lxr]_layers$|^num_(hidden|encoder|decoder)_blocks$|^num_self_attends_per_block$"
)
_HEADS = re.compile(r"heads$|(^|_)(n|num)_head$")
_KEY_HEADS = re.compile(r"key_value_heads$|kv_heads$|num_query_groups$")
_WIDTHS = re.compile(
    r"(hidden|intermediate|inner|ffn|mlp|embed|embedding|projection|proj|out|output|input|shared|expert|lru|model|feed_forward"
    r"|entity_emb|d_inner|true_hidden|bottleneck|cross)\w*_(size|dim|width|features|channels)$"
    r"|^(hidden_size|d_model|n_embd|embed_dim|dim|width|d_ff|d_inner|n_inner|hidden_dim|ffn_dim|embedding_dim|dim_feedforward)$"
)
_MAIN_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "out_hidden_size")
_NO_WIDTH = re.compile(
    r"(head|image|vocab|patch|kernel|window|rank|codebook|batch|seq|position|layer|num_|pair|distogram|state)"
)
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(\w+_)?experts$|^moe_num_experts$|^zero_expert_num$")
_CHOSEN = re.compile(r"(experts_per_tok|experts_per_token|top_k|topk|num_selected_experts|moe_k)$")
_EVERY = re.compile(r"(period|interval|pattern|freq|sparse_step)$")
_OFFSET = re.compile(r"layer_offset$")
_PLACES = re.compile(r"(idx|index|indices|idxs|indexes|layer_ids|layers|layer)$")
_TOKEN = re.compile(
    r"(token_id|token_index|_bos_id|_eos_id|_pad_id|token_ids|_start_id|_end_id|_newline_id|_patch_id)s?$"
)

# Given where a default is None though the model needs a number.
_ALWAYS = {"num_experts_per_tok": 2}
_RESNET = {
    "model_type": "resnet",
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "hidden_sizes": [32, 32, 64, 64],
}
_LAST_STAGE = {"backbone_config": {**_RESNET, "out_features": ["stage4"]}}
_STAGES = {"backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]}}

# What the rules below get wrong, by model type.
_SPECIAL: dict[str, dict[str, Any]] = {
    # Their defaults are backbones of another library.
    "detr": _LAST_STAGE,
    "conditional_detr": _LAST_STAGE,
    "table-transformer": _LAST_STAGE,
    "dab-detr": _LAST_STAGE,
    "deformable_detr": _STAGES,
    "grounding-dino": _STAGES,
    "mm-grounding-dino": _STAGES,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "falcon": {"hidden_size": 128, "num_attention_heads": 4, "num_kv_heads": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
    },
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"]},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0},
    "whisper": {"max_source_positions": 32},
    "reformer": {
        "axial_pos_shape": [4, 4],
        "is_decoder": True,
        "hidden_size": 256,
        "num_attention_heads": 12,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 4,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "rwkv": {"attention_hidden_size": None},
    "funnel": {"block_sizes": [1, 1, 1]},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "timesformer": {"num_frames": 2},
    "vivit": {"num_frames": 2},
    "speecht5": {"vocab_size": 81},
    "vits": {"vocab_size": 38},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "layoutlmv3": {"coordinate_size": 32, "shape_size": 32},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX", "de_DE"]},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "perceiver": {"num_latents": 16, "d_latents": 64},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4},
    "beit": {"out_indices": [1, 2, 3, 4], "num_hidden_layers": 4},
    "data2vec-vision": {"out_indices": [1, 2, 3, 4], "num_hidden_layers": 4},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1]},
    "idefics": {"cross_layer_interval": 1},
    "sam_vision_model": {"global_attn_indexes": [1]},
    "patchtst": {"context_length": 32, "prediction_length": 8},
    "patchtsmixer": {"context_length": 32, "prediction_length": 8},
    "time_series_transformer": {"prediction_length": 6, "context_length": 12},
    "informer": {"prediction_length": 6, "context_length": 12},
    "autoformer": {"prediction_length": 6, "context_length": 12},
}


def model_classes() -> dict[str, str]:
    """Return the names of the model classes of the installed transformers, each with the type of
    its configuration.
    """
    by_type: dict[str, set[str]] = {}
    for key, names in vars(modeling_auto).items():
        if key.startswith("MODEL_") and key.endswith("MAPPING_NAMES"):
            for kind, value in names.items():
                by_type.setdefault(kind, set()).update([value] if isinstance(value, str) else value)
    modules = {}
    for names in by_type.values():
        for name in names:
            with contextlib.suppress(Exception):
                modules[sys_module(name)] = None
    found: dict[str, str] = {}
    for module in modules:
        with contextlib.suppress(ImportError):  # what it needs is not installed
            found.update(dict.fromkeys(importlib.import_module(module).__all__, ""))
    for kind, names in by_type.items():
        found.update(dict.fromkeys(names, kind))
    # Users also call encoders directly, which the package does not export (WhisperEncoder).
    for name in [name for name in found if name.endswith("Model")]:
        found.setdefault(f"{name.removesuffix('Model')}Encoder", found[name])
    return {name: kind for name, kind in sorted(found.items()) if is_model(name)}


def class_named(name: str) -> Any:
    """Return a class of transformers, or an encoder from the module of its model."""
    found = getattr(transformers, name, None)
    if found is None:
        module = sys_module(f"{name.removesuffix('Encoder')}Model")
        found = getattr(importlib.import_module(module), name)
    return found


def sys_module(name: str) -> str:
    """Return the module of a class of transformers."""
    return str(getattr(transformers, name).__module__)


def is_model(name: str) -> bool:
    """Return whether transformers has a model class of this name that can be made from a
    configuration.
    """
    with contextlib.suppress(Exception):
        cls = class_named(name)
        is_base = cls.forward is torch.nn.Module.forward or cls.config_class is None
        return isinstance(cls, type) and issubclass(cls, PreTrainedModel) and not is_base
    return False


def config_class_of(cls: type) -> Any:
    """Return the class of a model's configuration."""
    found = cls.config_class  # type: ignore[attr-defined]
    if isinstance(found, type) and found is not PretrainedConfig:
        return found
    annotated = inspect.get_annotations(cls, eval_str=True).get(
        "config"
    ) or cls.__annotations__.get("config")
    if isinstance(annotated, type):
        return annotated
    return found


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a configuration and those in it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from parts_of(value)


# From the smallest to the one of the defaults; each leaves out what the one before has changed and
# may be why it fails.
RUNGS: tuple[frozenset[str], ...] = (
    frozenset({"layers", "experts", "widths", "vocabulary", "images"}),
    frozenset({"layers", "experts", "vocabulary", "images"}),
    frozenset({"layers", "experts", "widths", "vocabulary"}),
    frozenset({"layers", "experts", "widths"}),
    frozenset({"layers", "experts"}),
    frozenset(),
)


def small_config(cls: type, rung: frozenset[str]) -> Any:
    """Return a model class's default configuration, shrunk as a rung says."""
    kind = config_class_of(cls)
    default = _default(kind)
    if "vocabulary" in rung:
        ids = _special_ids(default)
    else:
        ids = {}
    return _fitted(_shrunk(default, rung, _factor(default) if "widths" in rung else 1, ids))


def _fitted(config: Any) -> Any:
    """Have what a part gives as wide as what the text takes: the defaults of two parts are often of
    two models.
    """
    width = getattr(config.get_text_config(), "hidden_size", None)
    if not isinstance(width, int) or config.get_text_config() is config:
        return config
    for part in parts_of(config):
        for name in ("out_hidden_size", "projection_dim"):
            if hasattr(part, name) and "clip" not in part.model_type:
                setattr(part, name, width)
        if part.model_type == "qwen2_vl_vision":
            part.hidden_size = width
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name) and getattr(config, name) is None:
            setattr(config, name, _FIRST_SPECIAL - 1)
    return config


def _default(kind: Any) -> Any:
    if kind.model_type in ("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder"):
        first = {
            "encoder-decoder": "bert",
            "vision-encoder-decoder": "vit",
            "speech-encoder-decoder": "wav2vec2",
        }
        encoder = CONFIG_MAPPING[first[kind.model_type]]()
        decoder = CONFIG_MAPPING["bert"](is_decoder=True, add_cross_attention=True)
        made = kind.from_encoder_decoder_configs(encoder, decoder)
        made.decoder_start_token_id = 1
        made.pad_token_id = 0
        return made
    if kind.model_type == "vision-text-dual-encoder":
        return kind.from_vision_text_configs(CONFIG_MAPPING["vit"](), CONFIG_MAPPING["bert"]())
    if kind.model_type == "rag":
        return kind.from_question_encoder_generator_configs(
            CONFIG_MAPPING["dpr"](), CONFIG_MAPPING["bart"]()
        )
    return kind()


def _own(config: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if not key.startswith("_")}


def _factor(config: Any) -> int:
    """Return what all widths and numbers of heads can be divided by, so that heads keep their size
    and parts fit together.
    """
    heads = [
        value
        for part in parts_of(config)
        for key, value in _own(part).items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and _HEADS.search(key)
        and not _KEY_HEADS.search(key)
        and value > 1
    ]
    widths = [
        value
        for part in parts_of(config)
        for key, value in _own(part).items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and key in _MAIN_WIDTHS
        and value >= 64
    ]
    if heads:
        common = math.gcd(*heads)
    else:
        common = 4
    most = max(widths, default=64)
    for factor in (16, 8, 4, 3, 2):
        if (
            common % factor == 0
            and all(width % (4 * factor) == 0 for width in widths)
            and most / factor >= 128
        ):
            return factor
    return 1


def _is_width(key: str) -> bool:
    return bool(_WIDTHS.search(key)) and not _NO_WIDTH.search(key)


def _special_ids(config: Any) -> dict[int, int]:
    """Return smaller numbers for the special tokens beyond a small vocabulary, the same in all
    parts.
    """
    found: dict[int, None] = {}
    for part in parts_of(config):
        for key, value in _own(part).items():
            if _TOKEN.search(key):
                for each in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(each, int) and each >= VOCABULARY - 1:
                        found[each] = None
    return {old: _FIRST_SPECIAL + number for number, old in enumerate(found)}


def _shrunk(config: Any, rung: frozenset[str], factor: int, ids: Mapping[int, int]) -> Any:
    changed: dict[str, Any] = {}
    own = _own(config)
    plain = {}
    with contextlib.suppress(Exception):
        plain = _own(type(config)())
    for key, value in own.items():
        if isinstance(value, PretrainedConfig):
            changed[key] = _shrunk(value, rung, factor, ids)
        elif (
            key in ("num_key_value_heads", "head_dim")
            and value is None
            and "num_attention_heads" in own
        ):
            heads = own["num_attention_heads"]
            if "heads" in key:
                changed[key] = heads // factor
            else:
                changed[key] = own["hidden_size"] // heads
        elif value is None and key in _ALWAYS:
            changed[key] = _ALWAYS[key]
        else:
            new = _new_value(key, value, rung, factor, ids, own)
            if (new is not value and new != value) or _is_given(key, value, plain):
                changed[key] = new
    kinds = list(dict.fromkeys(own.get("layer_types") or ()))
    if (
        "layers" in rung
        and len(kinds) > 1
        and "num_hidden_layers" in own
        and config.model_type not in _SPECIAL
    ):
        changed |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    special = {
        name: value
        for name, value in _SPECIAL.get(config.model_type, {}).items()
        if "layers" in rung
    }
    return _made(type(config), {**_asked(config), **changed, **special}, config)


def _is_given(key: str, value: Any, plain: Mapping[str, Any]) -> bool:
    """Return whether a configuration was made with a number that is not its class's default."""
    return (
        isinstance(value, (int, float, str))
        and key in plain
        and plain[key] != value
        and key != "transformers_version"
    )


def _asked(config: Any) -> dict[str, Any]:
    """Return what a configuration was made with beside its class's defaults."""
    if getattr(config, "add_cross_attention", False):
        return {"is_decoder": True, "add_cross_attention": True}
    return {}


def _made(kind: Any, changed: Mapping[str, Any], default: Any) -> Any:
    if kind.model_type in ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"):
        made = kind.from_encoder_decoder_configs(changed["encoder"], changed["decoder"])
        made.decoder_start_token_id = 1
        made.pad_token_id = 0
        return made
    if kind.model_type == "vision-text-dual-encoder":
        return kind.from_vision_text_configs(changed["vision_config"], changed["text_config"])
    if kind.model_type == "rag":
        return kind.from_question_encoder_generator_configs(
            changed["question_encoder"], changed["generator"]
        )
    accepted = inspect.signature(kind.__init__).parameters
    backwards = {new: old for old, new in getattr(kind, "attribute_map", {}).items()}
    given = {}
    for key, value in changed.items():
        if key in accepted or backwards.get(key) not in accepted:
            name = key
        else:
            name = backwards[key]
        if isinstance(value, PretrainedConfig) and not _takes_objects(kind):
            given[name] = value.to_dict()
        else:
            given[name] = value
    if "backbone_config" in given and "backbone" in accepted:
        given |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return kind(**given)


def _takes_objects(kind: Any) -> bool:
    """Return whether a configuration takes those of its parts, and not their dictionaries alone."""
    return bool(getattr(kind, "sub_configs", None)) and Version(
        transformers.__version__
    ) >= Version("5")


def _new_value(
    key: str,
    value: Any,
    rung: frozenset[str],
    factor: int,
    ids: Mapping[int, int],
    own: Mapping[str, Any],
) -> Any:
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, int) for each in value):
        return _new_list(key, value, rung, ids, own)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _TOKEN.search(key):
        return ids.get(value, value)
    for group, rule in _RULES.items():
        if group in rung:
            new = rule(key, value, own)
        else:
            new = None
        if new is not None:
            return new
    if factor == 1:
        return value
    return _narrower(key, value, factor)


def _new_list(
    key: str, value: Any, rung: frozenset[str], ids: Mapping[int, int], own: Mapping[str, Any]
) -> Any:
    if key in ("depths", "layers") and "layers" in rung:
        return type(value)(min(each, 2) for each in value)
    if _TOKEN.search(key):
        return type(value)(ids.get(each, each) for each in value)
    if _PLACES.search(key) and "layers" in rung and max(value) > 1 and "depths" not in own:
        return type(value)(sorted({min(each, 1) for each in value}))
    return value


def _fewer_layers(key: str, value: int, own: Mapping[str, Any]) -> int | None:
    del own
    if _LAYERS.search(key) or _EVERY.search(key):
        return min(value, 2)
    if _OFFSET.search(key) or key in (
        "first_k_dense_replace",
        "moe_layer_start_index",
        "num_dense_layers",
    ):
        return min(value, 1)
    if key in ("num_queries", "num_query_tokens", "num_detection_tokens"):
        return min(value, 16)
    return None


def _fewer_experts(key: str, value: int, own: Mapping[str, Any]) -> int | None:
    del own
    if _EXPERTS.search(key):
        return min(value, 4)
    if _CHOSEN.search(key):
        return min(value, 2)
    if key in ("n_group", "topk_group", "num_expert_group", "moe_topk_group"):
        return 1
    return None


def _fewer_words(key: str, value: int, own: Mapping[str, Any]) -> int | None:
    del own
    if "vocab_size" in key and "type" not in key:
        return min(value, VOCABULARY)
    return None


def _smaller_images(key: str, value: int, own: Mapping[str, Any]) -> int | None:
    patch = own.get("patch_size")
    is_plain = key == "image_size" and isinstance(patch, int) and "depths" not in own
    return min(value, 4 * patch) if is_plain else None  # type: ignore[operator]


def _narrower(key: str, value: int, factor: int) -> int:
    if _KEY_HEADS.search(key):
        return max(1, value // factor)
    if (_HEADS.search(key) and value > 1) or (
        _is_width(key) and value >= 64 and value % factor == 0
    ):
        return value // factor
    return value


_RULES: dict[str, Callable[[str, int, Mapping[str, Any]], int | None]] = {
    "layers": _fewer_layers,
    "experts": _fewer_experts,
    "vocabulary": _fewer_words,
    "images": _smaller_images,
}


def make(cls: type, rung: frozenset[str]) -> Any:
    """Return a small model of a class, in evaluation mode; on no device where it stays too large to
    run for real.
    """
    config = small_config(cls, rung)
    for part in parts_of(config):
        part.dtype = torch.float32
        if getattr(part, "vocab_size", None) and getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    with torch.device("meta"):
        size = sum(tensor.numel() for tensor in _model_of(cls, config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it has {size:,} parameters")
    torch.manual_seed(0)
    model = _model_of(cls, config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Zeros hide what they are multiplied with.
            if (parameter.dim() > 1 and not parameter.any()) or not parameter.isfinite().all():
                parameter.normal_(0, 0.05)
    return model


def _model_of(cls: type, config: Any) -> Any:
    return cls(config)
