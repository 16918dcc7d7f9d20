"""Determine the kind of each layer: full, sliding or chunked attention, a state, or no cache.

Published configurations use a dozen encodings: ``layer_types``, a pattern of letters or numbers, a
period, lists of indices. families.toml maps each model type to its reader.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import ConfigError
from oomguard.core.files import read_tables
from oomguard.estimate.model.shape import FAMILIES, ModelShape, mistakes_in, printable

GEMMA4: Final = "gemma4"
MIMO: Final = "mimo_v2"
_KEYS_FILE: Final = Path(__file__).with_name("config_keys.toml")
# Tokens, flags and texts have no size. These values say that a feature is absent.
_ABSENT: Final[tuple[object, ...]] = (None, False, "", [], {}, 0)
_TYPES: Final[Mapping[str, str]] = FAMILIES["layer_types"]
_LETTERS: Final[Mapping[str, str]] = FAMILIES["layer_letters"]
_Reader = Callable[[ModelShape], tuple[str, ...]]


def unread_fields(shape: ModelShape) -> tuple[str, ...]:
    """Return the keys that may shape the cache or the weights but that oomguard does not read.

    An unknown type of model is such a key, and so is an unknown key whose name is not known to be
    harmless.
    """
    found = []
    if shape.model_type and shape.model_type not in _known("model_types"):
        found.append(f"model_type {printable(shape.model_type)}")
    parts = [shape.config]
    if shape.outer is not shape.config:
        parts.append({k: v for k, v in shape.outer.items() if not isinstance(v, Mapping)})
    for part in parts:
        for key, value in part.items():
            if value not in _ABSENT and key not in found and _is_unread(str(key), shape):
                found.append(str(key))
    return tuple(found)


def _is_unread(key: str, shape: ModelShape) -> bool:
    if key in _known("known"):
        return False
    if key in _known("shaping"):
        if key == "block_configs" and is_searched(shape):
            return False
        readers = _keys()["read_by"].get(key, ())
        return not shape.model_type.startswith(tuple(readers))
    return re.search(_keys()["harmless_names"], key) is None


@functools.cache
def _known(name: str) -> frozenset[str]:
    return frozenset(_keys()[name])


@functools.cache
def _keys() -> Mapping[str, Any]:
    return read_tables("config_keys", [_KEYS_FILE])[_KEYS_FILE]


def layer_kinds(shape: ModelShape) -> tuple[str, ...]:
    """Return each layer's kind, in order.

    A kind is ``full``, ``sliding``, ``chunked``, ``cross``, a kind of state, ``none``, or two of
    them joined by ``+``.

    Raises:
        ConfigError: the configuration has an unknown kind, or kinds for another number of layers.
    """
    with mistakes_in(shape.path):
        kinds = _reader(shape)(shape)
        if len(kinds) != shape.layers:
            raise ConfigError(
                f"the layer types name {len(kinds)} layers, but num_hidden_layers is {shape.layers}"
            )
        shared = shape.number("num_kv_shared_layers") or 0
        if shared >= shape.layers:
            raise ConfigError(
                f"num_kv_shared_layers is {shared}, but the model has {shape.layers} layers"
            )
    return kinds[: shape.layers - shared] + ("none",) * shared


def _reader(shape: ModelShape) -> _Reader:
    """Select the reader of the layer kinds.

    The family's own reader comes first, then the reader of a field in the file, then
    ``layer_types``.
    """
    if (own := FAMILIES["layers_read_as"].get(shape.model_type)) is not None:
        return _READERS[own]
    if (period := FAMILIES["full_attention_every"].get(shape.model_type)) is not None:
        return functools.partial(_every, field=period["field"], default=period["layers"])
    return next((read for field, read in _BY_FIELD.items() if shape.config.get(field)), _by_types)


def _by_types(shape: ModelShape) -> tuple[str, ...]:
    """Read ``layer_types``; without that field all layers have the same kind."""
    types = shape.config.get("layer_types")
    window = window_tokens(shape)
    if isinstance(types, list) and types:
        kinds = []
        for name in types:
            if isinstance(name, str):
                kind = _TYPES.get(name)
            else:
                kind = None
            if kind is None:
                raise ConfigError(f"layer_types has the unknown type {printable(name)}")
            # transformers writes sliding layers even without a window. vLLM then uses full
            # attention.
            kinds.append("full" if kind == "sliding" and not window else kind)
        return tuple(kinds)
    return ("sliding" if window else "full",) * shape.layers


def window_tokens(shape: ModelShape) -> int:
    """Return the tokens of the sliding window, or 0 without one."""
    if shape.config.get("use_sliding_window") is False:
        return 0
    return shape.number("sliding_window") or 0


def _every(shape: ModelShape, *, field: str, default: int) -> tuple[str, ...]:
    """Read a period: every n-th layer uses full attention, the others slide.

    The configuration's ``field`` is n; without it n is ``default``.
    """
    if isinstance(shape.config.get("layer_types"), list):
        return _by_types(shape)
    if not window_tokens(shape):
        return ("full",) * shape.layers
    step = shape.number(field) or default
    return tuple("full" if (i + 1) % step == 0 else "sliding" for i in range(shape.layers))


def _llama4(shape: ModelShape) -> tuple[str, ...]:
    """Read Llama 4's layers: chunked attention with rotary positions, full attention without.

    Every n-th layer has no rotary positions.
    """
    types = shape.config.get("layer_types")
    if isinstance(types, list) and types:
        return _by_types(shape)
    if not shape.number("attention_chunk_size"):
        return ("full",) * shape.layers
    rope = shape.config.get("no_rope_layers")
    step = shape.number("no_rope_layer_interval") or 4
    if isinstance(rope, list) and len(rope) == shape.layers:
        return tuple("chunked" if value else "full" for value in rope)
    return tuple("full" if (i + 1) % step == 0 else "chunked" for i in range(shape.layers))


def _qwen3_next(shape: ModelShape) -> tuple[str, ...]:
    if isinstance(shape.config.get("layer_types"), list):
        return _by_types(shape)
    step = shape.number("full_attention_interval") or 4
    return tuple("full" if (i + 1) % step == 0 else "delta" for i in range(shape.layers))


def _mamba1(shape: ModelShape) -> tuple[str, ...]:
    return ("mamba1",) * shape.layers


def _mamba2(shape: ModelShape) -> tuple[str, ...]:
    return ("mamba2",) * shape.layers


def _jamba(shape: ModelShape) -> tuple[str, ...]:
    period = shape.number("attn_layer_period") or 8
    offset = shape.number("attn_layer_offset") or 4
    return tuple("full" if i % period == offset % period else "mamba1" for i in range(shape.layers))


def _nemotron_h(shape: ModelShape) -> tuple[str, ...]:
    pattern = shape.config.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        types = shape.config.get("layers_block_type")
        if isinstance(types, list):
            return _by_names(types)
        return _by_types(shape)
    unknown = sorted(set(pattern) - set(_LETTERS))
    if unknown:
        raise ConfigError(
            f"hybrid_override_pattern has the unknown letter {unknown[0]!r}; known: "
            f"{' '.join(_LETTERS)}"
        )
    return tuple(_LETTERS[letter] for letter in pattern)


def _by_names(types: list[Any]) -> tuple[str, ...]:
    unknown = [name for name in types if not isinstance(name, str) or name not in _TYPES]
    if unknown:
        raise ConfigError(f"layers_block_type has the unknown type {printable(unknown[0])}")
    return tuple(_TYPES[name] for name in types)


def _zamba2(shape: ModelShape) -> tuple[str, ...]:
    types = shape.config.get("layers_block_type")
    if isinstance(types, list):
        return _by_names(types)
    ids = _indices(shape, "hybrid_layer_ids") or set()
    return tuple("mamba2+full" if i in ids else "mamba2" for i in range(shape.layers))


def _bamba(shape: ModelShape) -> tuple[str, ...]:
    if isinstance(shape.config.get("layer_types"), list):
        return tuple("mamba2" if kind == "delta" else kind for kind in _by_types(shape))
    ids = _indices(shape, "attn_layer_indices") or set()
    return tuple("full" if i in ids else "mamba2" for i in range(shape.layers))


def _falcon_h1(shape: ModelShape) -> tuple[str, ...]:
    return ("mamba2+full",) * shape.layers


def _lfm2(shape: ModelShape) -> tuple[str, ...]:
    if isinstance(shape.config.get("layer_types"), list):
        return _by_types(shape)
    listed = _indices(shape, "full_attn_idxs")
    if listed is None:
        ids = set(range(shape.layers))
    else:
        ids = listed
    return tuple("full" if i in ids else "conv" for i in range(shape.layers))


def _encoder_decoder(shape: ModelShape) -> tuple[str, ...]:
    """Return decoder layers with self-attention and cross-attention to the encoder."""
    return ("full+cross",) * shape.layers


def _by_numbers(shape: ModelShape) -> tuple[str, ...]:
    """Read a pattern of 1 for a window and 0 for full attention.

    Source: vllm/model_executor/models/mimo_v2.py, 0.32.
    """
    pattern = shape.config["hybrid_layer_pattern"]
    if shape.model_type.startswith(MIMO):
        if not isinstance(pattern, list) or not all(number in (0, 1) for number in pattern):
            raise ConfigError(
                f"hybrid_layer_pattern must be a list of 0 and 1, got {printable(pattern)}"
            )
        return tuple("sliding" if number else "full" for number in pattern)
    return _by_types(shape)


def is_searched(shape: ModelShape) -> bool:
    """Return whether ``block_configs`` describes each layer of a searched architecture.

    Other models use the same field name for something else.
    """
    blocks = shape.config.get("block_configs")
    if isinstance(blocks, list):
        own = blocks[: shape.layers]
    else:
        own = []
    return any(isinstance(block, Mapping) and "attention" in block for block in own)


def blocks_of_layers(shape: ModelShape) -> tuple[Mapping[str, Any], ...]:
    """Return each layer's attention in a searched architecture.

    Source: vllm/model_executor/models/nemotron_nas.py, 0.32.
    """
    blocks = shape.config["block_configs"]
    parts = [block.get("attention") for block in blocks if isinstance(block, Mapping)]
    if len(parts) != shape.layers or not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError(
            f"block_configs does not describe the attention of each of {shape.layers} layers"
        )
    return tuple(part for part in parts if isinstance(part, Mapping))


def _by_blocks(shape: ModelShape) -> tuple[str, ...]:
    if not is_searched(shape):
        return _by_types(shape)
    return tuple("none" if part.get("no_op") else "full" for part in blocks_of_layers(shape))


def _indices(shape: ModelShape, name: str) -> set[int] | None:
    """Return the layers in a list of indices, or None if the file has no such list."""
    listed = shape.config.get(name)
    if not isinstance(listed, list):
        return None
    if not all(isinstance(i, int) for i in listed):
        raise ConfigError(f"{name} must be a list of layers, got {printable(listed)}")
    return set(listed)


def _by_linear_attention(shape: ModelShape) -> tuple[str, ...]:
    """Read the layers of delta attention, which the file counts from 1.

    Source: vllm/transformers_utils/configs/kimi_linear.py, 0.32.
    """
    part = shape.config["linear_attn_config"]
    if isinstance(part, Mapping):
        listed = part.get("kda_layers")
    else:
        listed = None
    if not isinstance(listed, list):
        raise ConfigError("linear_attn_config has no list kda_layers")
    delta = {number for number in listed if isinstance(number, int)}
    return tuple("kda" if i + 1 in delta else "full" for i in range(shape.layers))


# Readers of fields that mean the same in every family.
_BY_FIELD: Final[Mapping[str, _Reader]] = {
    "hybrid_layer_pattern": _by_numbers,
    "block_configs": _by_blocks,
    "linear_attn_config": _by_linear_attention,
}
# Readers by their names in families.toml.
_READERS: Final[Mapping[str, _Reader]] = {
    "llama4": _llama4,
    "qwen3_next": _qwen3_next,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "encoder_decoder": _encoder_decoder,
}
