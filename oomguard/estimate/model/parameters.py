"""List a model's parameters without its weights: built by transformers, or computed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import ConfigError
from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.layer_kinds import layer_kinds
from oomguard.estimate.model.shape import FAMILIES, ModelShape

# transformers creates a module, a name or a row for every count in an untrusted file, without any
# limit. Ten billion layers would become a list of ten billion names, so oomguard checks first.

# Fields whose items transformers creates one by one, unlike widths and lengths in tokens.
_MADE: Final = re.compile(
    r"layer|depth|block|stage|expert|head|level|branch|codebook|stack|^n_|^num_"
)
_WIDTH: Final = re.compile(
    r"size|dim|width|token|length|positions|ctx|embd|embed|inner|vocab|channels|patch|_ids?$|params|parameters"
)
_MOST_MADE: Final = 2048
# The number of layers times experts in a mixture. The largest published models have some 25
# thousand.
_MOST_EXPERTS: Final = 100_000
_LAYERS: Final = re.compile(r"layers?$|^depth$")
_EXPERTS: Final = re.compile(r"experts$")
# No width, vocabulary or length in tokens is near this limit, but bases of rotary positions are.
_MOST: Final = 1 << 28
_BASE: Final = re.compile(r"theta|base")


def is_buildable(config: Mapping[str, Any]) -> bool:
    """Return whether transformers can build a configuration in reasonable time."""
    layers = experts = 1
    for name, value in _numbers(config):
        if not abs(value) < _MOST and not _BASE.search(name):
            return False
        if _MADE.search(name) and not _WIDTH.search(name) and value > _MOST_MADE:
            return False
        if _LAYERS.search(name):
            layers = max(layers, round(value))
        if _EXPERTS.search(name):
            experts = max(experts, round(value))
    return layers * experts <= _MOST_EXPERTS


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield each finite number at any depth with the name of its field or its list's field."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            left += value.items()
        elif isinstance(value, list):
            left += ((name, inner) for inner in value)
        elif isinstance(value, int) or (isinstance(value, float) and abs(value) < float("inf")):
            yield str(name), value


def build_on_meta(shape: ModelShape) -> tuple[Parameter, ...] | None:
    """Build every parameter with transformers on the meta device, which allocates nothing.

    A model of several parts includes all of them. Returns None if transformers is absent, does not
    know the model, or would never finish because of absurd counts.
    """
    if not is_buildable(shape.outer) or not is_transformers_here():
        return None
    with _quiet():
        try:
            return tuple(_build(shape))
        except Exception:  # noqa: BLE001
            # Remote code, a new family, or fields of another version: the shape gives the counts.
            return None


_DEFAULTS_FILE: Final = Path(__file__).with_name("family_defaults.json")


@functools.cache
def _family_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return the counts that a file may leave to its family, as transformers 5.23 has them."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(_DEFAULTS_FILE.read_text("utf-8"))
    return found


def fill_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the counts that its family sets by default.

    Published files omit heads, layers, even the vocabulary. They come from a data file, else from
    transformers. The configuration returns unchanged if neither knows the model, or if
    transformers would never finish because of absurd counts.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return config
    known = _family_defaults().get(kind)
    if known is not None:
        return _with_defaults(known, config)
    if not is_buildable(config) or not is_transformers_here():
        return config
    with _quiet():
        try:
            filled = auto_config(config).to_dict()
        except Exception:  # noqa: BLE001 - what it does not know is read as it stands
            return config
    return _merged(filled, config)


def _with_defaults(known: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that the file has, each with the family's counts for missing ones.

    Older files have the language model's numbers next to the parts instead of in a separate part.
    """
    found = {name: value for name, value in known.items() if not isinstance(value, Mapping)}
    text = known.get("text_config")
    if isinstance(text, Mapping) and not isinstance(config.get("text_config"), Mapping):
        found |= {name: value for name, value in text.items() if name != "model_type"}
    found |= {name: value for name, value in config.items() if value is not None}
    for name, part in known.items():
        own = config.get(name)
        if isinstance(part, Mapping) and isinstance(own, Mapping):
            found[name] = {
                **part,
                **{key: value for key, value in own.items() if value is not None},
            }
    return found


def _merged(filled: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations part by part; ``given`` takes precedence."""
    both = {**filled, **{name: value for name, value in given.items() if value is not None}}
    for name, value in given.items():
        if isinstance(value, Mapping) and isinstance(filled.get(name), Mapping):
            both[name] = _merged(filled[name], value)
    return both


def is_transformers_here() -> bool:
    """Return whether transformers and torch can be imported."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


_NO_FIELDS: Final = frozenset({"model_type", "quantization_config"})
# transformers loads code that these fields name: classes in files of the model or on the hub, and
# attention kernels on the hub (``attn_implementation`` accepts ORG/NAME).
_CODE_FIELDS: Final = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "name_or_path",
    }
)


def auto_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration object, as for an unquantized model.

    The configuration is untrusted, so this function first removes fields that name code, at every
    depth.

    Raises:
        ConfigError: its counts are absurd, so building it would never finish.
        Exception: transformers itself rejects it.
    """
    if not is_buildable(config):
        raise ConfigError("its number of layers, experts or modules is larger than any model's")
    from transformers import AutoConfig

    fields = {
        name: _without_code(value)
        for name, value in config.items()
        if name not in _NO_FIELDS | _CODE_FIELDS
    }
    return AutoConfig.for_model(config["model_type"], **fields)


def _without_code(value: Any) -> Any:
    """Return a value without the fields that name code, at any depth."""
    if isinstance(value, Mapping):
        return {
            name: _without_code(inner) for name, inner in value.items() if name not in _CODE_FIELDS
        }
    if isinstance(value, list):
        return [_without_code(inner) for inner in value]
    return value


def _build(shape: ModelShape) -> Iterator[Parameter]:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSpeechSeq2Seq,
    )

    kind = AutoModelForCausalLM
    whole = dict(shape.config)
    if shape.model_type in FAMILIES["encoder_decoder"]:
        kind = AutoModelForSpeechSeq2Seq
        whole = dict(shape.outer)
    elif (
        shape.has_encoder
    ):  # the language model's part decides tying, whatever the outer class defaults to
        kind = AutoModelForImageTextToText
        whole = {**_loaded_part(shape.outer), "tie_word_embeddings": is_tied(shape)}
    whole["model_type"] = str(whole.get("model_type") or shape.model_type)
    with torch.device("meta"):
        model = kind.from_config(auto_config(whole), dtype=torch.bfloat16, trust_remote_code=False)
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen:  # count tied weights once
            seen.add(id(parameter))
            yield Parameter(name, tuple(parameter.shape), parameter.numel() * shape.dtype_bytes)


def _loaded_part(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that an engine loads.

    For a model that also speaks this is the thinker alone. Source:
    vllm/model_executor/models/qwen2_5_omni_thinker.py, 0.12 to 0.27.
    """
    part = outer.get("thinker_config")
    if isinstance(part, Mapping):
        return {"model_type": f"{outer.get('model_type')}_thinker", **part}
    return outer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings about a configuration; they do not concern a plan."""
    logger = logging.getLogger("transformers")
    before = os.environ.get("TRANSFORMERS_VERBOSITY")
    level = logger.level
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if before is None:
            os.environ.pop("TRANSFORMERS_VERBOSITY", None)
        else:
            os.environ["TRANSFORMERS_VERBOSITY"] = before


def count_parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """Compute the parameters of a decoder from its shape.

    The result is a few percent off in most families and much more in some (``well_counted``).
    """
    rows = [_parameter("model.embed_tokens.weight", (shape.vocab, shape.hidden), shape)]
    if not is_tied(shape):
        rows.append(_parameter("lm_head.weight", (shape.vocab, shape.hidden), shape))
    kinds = layer_kinds(shape)
    for i, kind in enumerate(kinds):
        rows += [
            _parameter(f"model.layers.{i}.{name}", size, shape)
            for name, size in _layer(shape, i, kind)
        ]
    return (*rows, _parameter("model.norm.weight", (shape.hidden,), shape))


def is_tied(shape: ModelShape) -> bool:
    """Return whether the head reuses the embedding, by the file or the type's default."""
    named = shape.config.get("tie_word_embeddings", shape.outer.get("tie_word_embeddings"))
    if named is None:
        return shape.model_type.startswith(tuple(FAMILIES["types"]["tied_by_default"]))
    return bool(named)


def is_count_accurate(shape: ModelShape) -> bool:
    """Return whether ``counted`` is accurate for this shape.

    It is for attention in every layer, one dense MLP, and no encoder.
    """
    plain = set(layer_kinds(shape)) <= {"full", "sliding", "chunked"} and not shape.has_encoder
    return (
        plain
        and not shape.config.get("block_configs")
        and (shape.number("num_experts") or 0) <= 1
        and not shape.number("kv_lora_rank")
    )


def _parameter(name: str, size: tuple[int, ...], shape: ModelShape) -> Parameter:
    return Parameter(name, size, prod(size) * shape.dtype_bytes)


def has_gate(shape: ModelShape) -> bool:
    """Return whether the MLP has a gate and an up projection before its activation."""
    return shape.model_type not in FAMILIES["types"]["two_matrices"]


def has_plain_activation(shape: ModelShape) -> bool:
    """Return whether the MLP has no gate and an activation that makes only one tensor."""
    activation = shape.config.get("hidden_act", shape.config.get("activation_function"))
    return not has_gate(shape) and activation in FAMILIES["types"]["plain_activations"]


def _layer(shape: ModelShape, index: int, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if kind.partition("+")[0] in {"full", "sliding", "chunked"} or "+" in kind or kind == "none":
        width = shape.heads * shape.head_dim
        kv = shape.kv_heads * shape.head_dim
        yield "self_attn.q_proj.weight", (width, hidden)
        yield "self_attn.k_proj.weight", (kv, hidden)
        yield "self_attn.v_proj.weight", (kv, hidden)
        yield "self_attn.o_proj.weight", (hidden, width)
    if kind.startswith(
        ("mamba", "delta", "conv", "kda")
    ):  # two or three projections of about twice the width
        yield "mixer.in_proj.weight", (4 * hidden, hidden)
        yield "mixer.out_proj.weight", (hidden, 2 * hidden)
    experts = shape.number("num_experts") or 0
    first_dense = shape.number("first_k_dense_replace") or 0
    intermediate = shape.number("intermediate_size") or 4 * hidden
    if experts > 1 and index >= first_dense:
        width = shape.number("moe_intermediate_size") or intermediate
        yield "mlp.gate.weight", (experts, hidden)
        yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
        yield "mlp.experts.down_proj", (experts, hidden, width)
        shared = shape.number("shared_expert_intermediate_size") or width * (
            shape.number("n_shared_experts") or 0
        )
        if shared:
            yield "mlp.shared_experts.gate_up_proj.weight", (2 * shared, hidden)
            yield "mlp.shared_experts.down_proj.weight", (hidden, shared)
    elif not kind.startswith("mamba"):
        yield "mlp.gate_up_proj.weight", ((2 if has_gate(shape) else 1) * intermediate, hidden)
        yield "mlp.down_proj.weight", (hidden, intermediate)
