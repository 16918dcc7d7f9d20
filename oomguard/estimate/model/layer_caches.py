"""Determine the kind of each layer, and compute its cache on one rank.

A layer has full, sliding or chunked attention, a state, or no cache. Published configurations use a
dozen encodings: ``layer_types``, a pattern of letters or numbers, a period, lists of indices.
families.toml maps each model type to its reader. A cache has keys and values, a latent vector, or a
state.

The counts are vLLM's. Sources: vllm/v1/kv_cache_interface.py, MambaStateShapeCalculator in
vllm/model_executor/layers/mamba/mamba_utils.py, and the model files of vLLM 0.32 and 0.33. The
result omits a layer without a cache: an MLP layer, or one that reuses another layer's keys and
values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from oomguard.core.errors import ConfigError
from oomguard.core.files import read_tables
from oomguard.estimate.model.shape import FAMILIES, ModelShape, is_count, mistakes_in, printable

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
        # Nested parts, such as an image encoder's, do not shape the language model.
        around = {}
        for key, value in shape.outer.items():
            if not isinstance(value, Mapping):
                around[key] = value
        parts.append(around)
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
    for field, read in _BY_FIELD.items():
        if shape.config.get(field):
            return read
    return _by_types


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
    unknown = []
    for name in types:
        if not isinstance(name, str) or name not in _TYPES:
            unknown.append(name)
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
    parts = []
    for block in blocks:
        if isinstance(block, Mapping):
            parts.append(block.get("attention"))
    if len(parts) != shape.layers or not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError(
            f"block_configs does not describe the attention of each of {shape.layers} layers"
        )
    found = []
    for part in parts:
        if isinstance(part, Mapping):
            found.append(part)
    return tuple(found)


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
    delta = set()
    for number in listed:
        if isinstance(number, int):
            delta.add(number)
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


Kind = Literal["full", "sliding", "chunked", "cross", "state"]

# Engines without latent vectors pad heads of 192 to this width
# (vllm/model_executor/models/deepseek_v2.py of 0.6.6).
_PADDED_WIDTH: Final = 256
_MLA_HEADS: Final = 1
_FLOAT32_BYTES: Final = 4
# A sparse attention's indexer caches its own key per token in eight bits, with a four-byte scale
# per 128 keys (vllm/model_executor/models/deepseek_v2.py, 0.32).
_INDEXER_GROUP = 128
_SCALE_BYTES = 4
_GEMMA4_FULL_WIDTH: Final = 512


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Describe one layer's cache on one rank.

    Attributes:
        index: the layer's number, which decides its pipeline stage.
        kind: the kind of cache; ``cross`` caches the encoder's input, not the request's tokens.
        token_bytes: bytes per token in an attention layer.
        state_bytes: bytes of a recurrent state.
        window_tokens: the sliding window or the chunk.
        latent: whether the layer caches one latent vector per token (MLA).
        checkpoints: additional states per request when prefix caching is on.
        block_tokens: the tokens of a block if the layer sets them itself, else 0.
        page_bytes: the bytes of such a block.
    """

    index: int
    kind: Kind
    token_bytes: int = 0
    state_bytes: int = 0
    window_tokens: int = 0
    latent: bool = False
    checkpoints: int = 0
    block_tokens: int = 0
    page_bytes: int = 0


def layer_caches(
    shape: ModelShape,
    *,
    kv_element_bytes: float,
    tensor_parallel_size: int = 1,
    state_dtype_bytes: int | None = None,
    latent: bool = True,
) -> tuple[LayerCache, ...]:
    """Return the caches of all layers on one rank.

    Args:
        shape: the model's numbers.
        kv_element_bytes: bytes per element of keys and values.
        tensor_parallel_size: the number of ranks that share each layer.
        state_dtype_bytes: bytes per element of a recurrent state; None uses the model's own.
        latent: whether the engine caches latent vectors; if not, it pads keys and values of every
            head.

    Raises:
        ConfigError: a number is missing or absurd.
    """
    if is_compressed(shape):
        return compressed_caches(shape)
    found: list[LayerCache] = []
    kinds: list[tuple[int, str]] = []
    for index, kind in enumerate(layer_kinds(shape)):
        kinds += [(index, part) for part in kind.split("+")]
    with mistakes_in(shape.path):
        for index, part in kinds:
            if part == "none":
                continue
            if part in {"full", "sliding", "chunked", "cross"}:
                of_layer = _attention(
                    shape,
                    index,
                    part,  # type: ignore[arg-type]
                    kv_element_bytes,
                    tensor_parallel_size,
                    latent=latent,
                )
                found.append(of_layer)
                found += _indexer(shape, index)
            else:
                size = _STATES[part](shape, tensor_parallel_size, state_dtype_bytes)
                found.append(
                    LayerCache(index, "state", state_bytes=size, checkpoints=part == "mamba2")
                )
    return tuple(found)


# DeepSeek V4 caches one entry for several tokens, plus a window of each layer and the unfinished
# states of its compressors. Sources: vllm/models/deepseek_v4/attention.py and compressor.py, 0.32.

_COMPRESSED_FIELD: Final = "compress_ratios"
_COMPRESSED_TYPE: Final = "deepseek_v4"
_BLOCK_TOKENS: Final = 256
_WINDOW_BLOCK_TOKENS: Final = 64
_ALIGNMENT_BYTES: Final = 576
_ENTRY_SCALE_BYTES: Final = 8
# For each ratio: the tokens of a block of unfinished states, and the windows that overlap.
_STATE_BLOCK_TOKENS: Final = {4: 4, 128: 8}
_OVERLAPS: Final = {4: 2, 128: 1}


def is_compressed(shape: ModelShape) -> bool:
    """Return whether layers cache one entry for several tokens (DeepSeek V4)."""
    ratios = shape.config.get(_COMPRESSED_FIELD)
    return shape.model_type == _COMPRESSED_TYPE and isinstance(ratios, list) and bool(ratios)


def compressed_caches(shape: ModelShape, first: int = 0) -> tuple[LayerCache, ...]:
    """Return the caches of all layers from ``first`` on, or of MTP layers behind the last one.

    Raises:
        ConfigError: a ratio is unknown, or a number is missing.
    """
    ratios = shape.config[_COMPRESSED_FIELD]
    if len(ratios) < shape.layers or not set(ratios) <= {0, 1, *_OVERLAPS}:
        raise ConfigError(
            f"compress_ratios must have a ratio of 0, 1, 4 or 128 for each of {shape.layers} "
            f"layers, got {printable(ratios)}"
        )
    rope = _needed(shape, "qk_rope_head_dim")
    window = _needed(shape, "sliding_window")
    entry = shape.head_dim - rope + 2 * rope + _ENTRY_SCALE_BYTES
    last = shape.layers if first < shape.layers else len(ratios)
    found = []
    for index in range(first, last):
        found.append(
            _block("sliding", index, _WINDOW_BLOCK_TOKENS, _WINDOW_BLOCK_TOKENS * entry, window)
        )
        ratio = ratios[index]
        if ratio not in _OVERLAPS:
            continue
        entries = _BLOCK_TOKENS // ratio
        widths = [shape.head_dim]
        found.append(_block("full", index, _BLOCK_TOKENS, entries * entry))
        if ratio == min(_OVERLAPS):  # these layers select entries with an indexer
            width = shape.number("index_head_dim") or _INDEXER_GROUP
            key = width + _SCALE_BYTES * -(-width // _INDEXER_GROUP)
            found.append(_block("full", index, _BLOCK_TOKENS, entries * key))
            widths.append(width)
        tokens = _STATE_BLOCK_TOKENS[ratio]
        overlap = _OVERLAPS[ratio]
        for width in widths:
            size = tokens * 2 * overlap * width * _FLOAT32_BYTES
            found.append(_block("sliding", index, tokens, size, overlap * ratio))
    return tuple(found)


def _block(kind: Kind, index: int, tokens: int, size_bytes: int, window: int = 0) -> LayerCache:
    page = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return LayerCache(
        index,
        kind,
        token_bytes=page // tokens,
        window_tokens=window,
        latent=True,
        block_tokens=tokens,
        page_bytes=page,
    )


def keeps_latent(shape: ModelShape) -> bool:
    """Return whether attention caches one latent vector per token (MLA), not keys and values."""
    return (
        bool(shape.number("kv_lora_rank"))
        and shape.model_type in FAMILIES["types"]["latent_attention"]
    )


def _attention(
    shape: ModelShape, index: int, kind: Kind, element_bytes: float, ranks: int, *, latent: bool
) -> LayerCache:
    rank = shape.number("kv_lora_rank")
    if rank and keeps_latent(shape) and latent:
        rope = shape.number("qk_rope_head_dim")
        if rope is None:
            raise ConfigError("qk_rope_head_dim is missing, but kv_lora_rank is set")
        # One latent vector replaces keys and values, and every rank stores all of it.
        return LayerCache(
            index,
            "full",
            token_bytes=round(_MLA_HEADS * (rank + rope) * element_bytes),
            latent=True,
        )
    kv_heads, key, value = _heads(shape, index, kind)
    if rank and (nope := shape.number("qk_nope_head_dim")):
        key = value = nope + (
            shape.number("qk_rope_head_dim") or 0
        )  # expanded: values are padded to the width of keys
        if keeps_latent(shape):
            key = value = _PADDED_WIDTH
    # with more ranks than heads, each rank has a copy of one head
    heads = max(1, kv_heads // ranks)
    window = {
        "sliding": window_tokens(shape),
        "chunked": shape.number("attention_chunk_size") or 0,
    }.get(kind, 0)
    if not heads * (key + value):
        raise ConfigError(f"the head size of layer {index} is 0")
    return LayerCache(
        index, kind, token_bytes=round(heads * (key + value) * element_bytes), window_tokens=window
    )


def _heads(shape: ModelShape, index: int, kind: Kind) -> tuple[int, int, int]:
    """Return a layer's number of key-value heads and the widths of a key and a value."""
    own = shape.config.get("per_layer_config")
    if isinstance(own, Mapping):
        layer = own.get(str(index), own.get(index))
        if isinstance(layer, Mapping):
            changed = layer
        else:
            changed = {}
        found = [
            changed.get("num_key_value_heads", shape.kv_heads),
            changed.get("head_dim", shape.head_dim),
        ]
        if not all(is_count(n) and n > 0 for n in found):
            raise ConfigError(f"per_layer_config has {printable(found)} for layer {index}")
        return found[0], found[1], found[1]
    if is_searched(shape):
        group = blocks_of_layers(shape)[index].get("n_heads_in_group")
        if not is_count(group) or not 0 < group <= shape.heads:
            raise ConfigError(
                f"block_configs has n_heads_in_group {printable(group)} for layer {index}"
            )
        return shape.heads // group, shape.head_dim, shape.head_dim
    if shape.model_type.startswith(MIMO):
        if kind == "sliding":
            swa = "swa_"
        else:
            swa = ""
        key = _needed(shape, f"{swa}head_dim")
        return (
            _needed(shape, f"{swa}num_key_value_heads"),
            key,
            shape.number(f"{swa}v_head_dim") or key,
        )
    if shape.model_type.startswith(GEMMA4) and kind == "full":
        # Full attention has wider heads, and fewer of them if keys double as values
        # (configuration_gemma4.py, 5.23).
        if shape.config.get("attention_k_eq_v"):
            heads = shape.number("num_global_key_value_heads")
        else:
            heads = None
        width = shape.number("global_head_dim") or _GEMMA4_FULL_WIDTH
        return heads or shape.kv_heads, width, width
    return shape.kv_heads, shape.head_dim, shape.head_dim


def _indexer(shape: ModelShape, index: int) -> list[LayerCache]:
    if not shape.number("index_topk") or not keeps_latent(shape) or _shares_index(shape, index):
        return []
    width = shape.number("index_head_dim") or _INDEXER_GROUP
    size = width + _SCALE_BYTES * -(-width // _INDEXER_GROUP)
    return [LayerCache(index, "full", token_bytes=size, latent=True)]


def _shares_index(shape: ModelShape, index: int) -> bool:
    """Return whether a layer attends to the keys that an earlier layer's indexer chose.

    Source: vllm/model_executor/models/deepseek_v2.py, 0.32.
    """
    types = shape.config.get("indexer_types")
    if isinstance(types, list):
        return index < len(types) and types[index] == "shared"
    every = shape.number("index_topk_freq") or 1
    offset = shape.number("index_skip_topk_offset")
    return max(index - (2 if offset is None else offset) + 1, 0) % every != 0


def _needed(shape: ModelShape, *names: str) -> int:
    for name in names:
        value = shape.number(name)
        if value is not None:
            return value
    raise ConfigError(f"{names[0]} is missing")


def _mamba1_bytes(shape: ModelShape, ranks: int, dtype_bytes: int | None) -> int:
    """Return the bytes of a Mamba layer's convolution and recurrent state.

    Source: mamba1_state_shape.
    """
    inner = shape.number("mamba_expand") or shape.number("expand") or 2
    if shape.model_type == "jamba":
        width = inner * shape.hidden
    else:
        width = shape.number("intermediate_size") or inner * shape.hidden
    kernel = _needed(shape, "conv_kernel", "mamba_d_conv")
    states = _needed(shape, "state_size", "mamba_d_state", "ssm_state_size")
    return (
        width
        // ranks
        * ((kernel - 1) * shape.dtype_bytes + states * (dtype_bytes or shape.dtype_bytes))
    )


def _mamba2_bytes(shape: ModelShape, ranks: int, dtype_bytes: int | None) -> int:
    """Return the bytes of a Mamba 2 layer's convolution and recurrent state.

    Source: mamba2_state_shape.
    """
    heads = _needed(
        shape,
        "mamba_n_heads",
        "mamba_num_heads",
        "n_mamba_heads",
        "num_heads",
        "num_attention_heads",
    )
    states = _needed(shape, "mamba_d_state", "ssm_state_size", "state_size")
    kernel = _needed(shape, "mamba_d_conv", "conv_kernel")
    head = _needed(shape, "mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    groups = _needed(shape, "mamba_n_groups", "mamba_ngroups", "n_groups")
    if groups % ranks:
        groups = ranks  # each rank needs one, so groups are repeated
    inner = shape.number("mamba_d_ssm") or heads * head
    convolution = (inner + 2 * groups * states) // ranks * (kernel - 1) * shape.dtype_bytes
    return convolution + heads // ranks * head * states * (
        dtype_bytes or _mamba2_dtype_bytes(shape)
    )


def _mamba2_dtype_bytes(shape: ModelShape) -> int:
    """Return the bytes per element of the state.

    Nemotron-H uses float32 unless its file names another type. Source:
    vllm/model_executor/models/config.py.
    """
    if shape.model_type != "nemotron_h":
        return shape.dtype_bytes
    named = shape.config.get("mamba_ssm_cache_dtype") or "float32"
    if named == "float32":
        return _FLOAT32_BYTES
    return shape.dtype_bytes


def _delta_bytes(shape: ModelShape, ranks: int, dtype_bytes: int | None) -> int:
    """Return the bytes of a gated delta net's convolution and recurrent state.

    Source: gated_delta_net_state_shape.
    """
    keys = _needed(shape, "linear_num_key_heads")
    values = _needed(shape, "linear_num_value_heads")
    key = _needed(shape, "linear_key_head_dim")
    value = _needed(shape, "linear_value_head_dim")
    kernel = _needed(shape, "linear_conv_kernel_dim")
    convolution = (2 * key * keys + value * values) // ranks * (kernel - 1) * shape.dtype_bytes
    named = shape.config.get("mamba_ssm_dtype")
    return convolution + values // ranks * value * key * (
        dtype_bytes or (_FLOAT32_BYTES if named == "float32" else shape.dtype_bytes)
    )


def _kda_bytes(shape: ModelShape, ranks: int, dtype_bytes: int | None) -> int:
    """Return the bytes of the convolution and recurrent state of Kimi's delta attention.

    Sources: kda_state_shape, kda_state_dtype.
    """
    part = shape.config["linear_attn_config"]
    found = [part.get(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size")]
    counts = []
    for n in found:
        if is_count(n) and n > 0:
            counts.append(n)
    if len(counts) != len(found):
        raise ConfigError(
            "linear_attn_config has invalid num_heads, head_dim or "
            f"short_conv_kernel_size: {printable(found)}"
        )
    heads, width, kernel = counts
    convolution = 3 * heads * width // ranks * (kernel - 1) * shape.dtype_bytes
    return convolution + heads // ranks * width * width * (dtype_bytes or _FLOAT32_BYTES)


def _conv_bytes(shape: ModelShape, ranks: int, dtype_bytes: int | None) -> int:
    """Return the bytes of a short convolution's state (short_conv_state_shape)."""
    del dtype_bytes
    width = shape.number("conv_dim") or shape.hidden
    return width // ranks * (_needed(shape, "conv_L_cache") - 1) * shape.dtype_bytes


_STATES: Final[Mapping[str, Callable[[ModelShape, int, int | None], int]]] = {
    "mamba1": _mamba1_bytes,
    "mamba2": _mamba2_bytes,
    "delta": _delta_bytes,
    "conv": _conv_bytes,
    "kda": _kda_bytes,
}
