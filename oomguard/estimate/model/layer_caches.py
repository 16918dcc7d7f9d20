"""Compute the cache of each layer on one rank: keys and values, a latent vector, or a state.

The counts are vLLM's. Sources: vllm/v1/kv_cache_interface.py, MambaStateShapeCalculator in
vllm/model_executor/layers/mamba/mamba_utils.py, and the model files of vLLM 0.32 and 0.33. The
result omits a layer without a cache: an MLP layer, or one that reuses another layer's keys and
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from oomguard.core.errors import ConfigError
from oomguard.estimate.model.layer_kinds import (
    GEMMA4,
    MIMO,
    blocks_of_layers,
    is_searched,
    layer_kinds,
    window_tokens,
)
from oomguard.estimate.model.shape import FAMILIES, ModelShape, is_count, mistakes_in, printable

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
    counts = [n for n in found if is_count(n) and n > 0]
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
