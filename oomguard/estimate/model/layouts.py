"""List a decoder's parameters from its layout in layouts.toml, without building the model.

transformers needs seconds to import and build the same model. A plan needs neither library if a
layout covers the model type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from oomguard.core.files import read_tables
from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.layer_kinds import GEMMA4, layer_kinds
from oomguard.estimate.model.shape import ModelShape, is_count

# A vision encoder's parameters come from encoder_layouts.toml in the same way.

_ENCODER_LAYOUTS_FILE: Final = Path(__file__).with_name("encoder_layouts.toml")
_SYMBOL: Final = re.compile(r"[A-Z]")
_COLORS: Final = 3
# Rows of Gemma 4's table of positions by default (configuration_gemma4.py, 5.23).
_POSITIONS_OF_GEMMA4: Final = 10240


def encoder_parameters_from_layout(shape: ModelShape) -> tuple[Parameter, ...] | None:
    """Return the parameters of a model's encoders of images and audio, and their projectors.

    Returns None if no layout covers its type, or the file lacks a number.
    """
    found: list[Parameter] = []
    covered = False
    for layout in _encoder_layouts_layouts().get(str(shape.outer.get("model_type")), ()):
        part = shape.outer.get(layout.get("part", "vision_config"))
        if layout.get("part") == "":
            part = shape.outer
        if not isinstance(part, Mapping):
            continue
        own = _parameters_of_encoder(shape, layout, part)
        if own is None:
            return None
        covered = True
        found += own
    return tuple(found) if covered else None


def _parameters_of_encoder(
    shape: ModelShape, layout: Mapping[str, Any], part: Mapping[str, Any]
) -> list[Parameter] | None:
    symbols = {"H": shape.hidden, **_encoder_layouts_symbols(shape.outer, part)}
    for symbol, key in layout.get("numbers", {}).items():
        if (number := _count(part, key)) is not None:
            symbols[symbol] = number
    where = layout.get("where", {})
    blocks = [
        layout["layer"],
        *(block for field, block in where.items() if part.get(field)),
    ]
    names = (layout.get("layers", "num_hidden_layers"), "depth")
    layers = next((count for name in names if (count := _count(part, name))), None)
    needed = _SYMBOL.findall(" ".join(_texts(blocks, layout["around"])))
    if layers is None or not set(needed) <= set(symbols):
        return None

    def rows(block: Mapping[str, str], prefix: str) -> Iterator[Parameter]:
        for name, text in block.items():
            size = tuple(dimension(part, symbols) for part in text.split(","))
            yield Parameter(prefix + name, size, prod(size) * shape.dtype_bytes)

    found: list[Parameter] = []
    for i in range(layers):
        for block in blocks:
            found += rows(block, f"{layout['prefix']}{i}.")
    for field, block in layout.get("each", {}).items():
        for i in range(len(part.get(field) or ())):
            found += rows({name.replace("#", str(i)): text for name, text in block.items()}, "")
    return [*found, *rows(layout["around"], "")]


def _encoder_layouts_symbols(outer: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout symbols that the configuration has numbers for."""
    patch, side, merge = (
        _count(vision, name) for name in ("patch_size", "image_size", "spatial_merge_size")
    )
    width = _count(vision, "embed_dim") or _count(vision, "hidden_size")
    frames = _count(vision, "temporal_patch_size") or 1
    ratio_of_mlp = _count(vision, "mlp_ratio")
    ratio = outer.get("downsample_ratio")
    if isinstance(ratio, float) and 0 < ratio <= 1:
        share = ratio
    else:
        share = None
    found = {
        "W": width,
        "I": _count(vision, "intermediate_size")
        or (width and ratio_of_mlp and width * ratio_of_mlp),
        "T": patch and _COLORS * frames * patch**2,
        "E": _count(vision, "num_position_embeddings"),
        "B": _count(vision, "position_embedding_size") or _POSITIONS_OF_GEMMA4,
        "D": _count(vision, "head_dim"),
        "G": _merged_width(outer, width),
        "C": patch and _COLORS * patch**2,
        "L": patch and side and (side // patch) ** 2,
        "P": patch and side and (side // patch) ** 2 + 1,
        "M": width and merge and width * merge**2,
        "S": width and share and round(width / share**2),
    }
    return {symbol: number for symbol, number in found.items() if number}


def _merged_width(outer: Mapping[str, Any], width: int | None) -> int | None:
    """Return the width of the patches that Mistral 3's projector merges."""
    side = _count(outer, "spatial_merge_size")
    if side is None or width is None:
        return None
    return width * side**2


def _count(part: Mapping[str, Any], name: str) -> int | None:
    value = part.get(name)
    if is_count(value) and value > 0:
        return value
    return None


def _texts(blocks: Iterable[Mapping[str, str]], around: Mapping[str, str]) -> Iterator[str]:
    for block in (*blocks, around):
        yield from block.values()


def dimension(text: str, symbols: Mapping[str, int]) -> int:
    """Compute a dimension of a layout: a sum of products of symbols and counts."""
    products = ([part.strip() for part in product.split("*")] for product in text.split("+"))
    return sum(
        prod(symbols[part] if part in symbols else int(part) for part in product)
        for product in products
    )


@functools.cache
def _encoder_layouts_layouts() -> Mapping[str, list[Mapping[str, Any]]]:
    tables = read_tables("encoder_layouts", [_ENCODER_LAYOUTS_FILE])[_ENCODER_LAYOUTS_FILE]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for layout in tables["encoders"]:
        for kind in layout["types"]:
            found.setdefault(kind, []).append(layout)
    return found


_FILE: Final = Path(__file__).with_name("layouts.toml")
# transformers builds single layers differently if one of these fields is set.
_BY_LAYER: Final = ("per_layer_config", "block_configs")


def parameters_from_layout(shape: ModelShape, *, tied: bool) -> tuple[Parameter, ...] | None:
    """Return every parameter of a decoder and its encoder.

    Returns None if no layout covers a type, or the file has a field that no layout covers.

    Args:
        shape: the model's numbers.
        tied: whether the head reuses the embedding.
    """
    kind = shape.model_type
    if kind == "gemma4_text" and shape.config.get("attention_k_eq_v"):
        kind = "gemma4_text with keys as values"
    layout = _layouts().get(kind)
    if shape.has_encoder:
        encoder = encoder_parameters_from_layout(shape)
    else:
        encoder = ()
    if layout is None or encoder is None or not _holds(layout, shape):
        return None
    symbols = _symbols(shape)
    blocks = _blocks()
    kinds = layout.get("kinds")
    parts = layer_parts(shape)

    def rows(names: list[str], prefix: str, own: Mapping[str, int]) -> Iterator[Parameter]:
        for name in names:
            for tensor, dimensions in blocks[name].items():
                size = tuple(_dimension(text, own, shape) for text in dimensions.split(","))
                yield Parameter(prefix + tensor, size, prod(size) * shape.dtype_bytes)

    chosen = [name for row in layout.get("where", ()) for name in _chosen(row, shape)]
    dense = layout.get("dense", [])
    sparse = layout.get("sparse", dense)
    if "sparse_behind" in layout:
        behind = shape.number(layout["sparse_behind"]) or 0
    else:
        behind = 0
    names = ["embedding"] + ([] if tied else ["head"])
    heads = [layout.get(name, _HEADS[name]) for name in names]
    table = (shape.vocab, shape.hidden)
    found = [Parameter(name, table, prod(table) * shape.dtype_bytes) for name in heads]
    if kinds is not None and not set(parts) <= set(kinds):
        return None
    for index, part in enumerate(parts):
        if index >= behind:
            mlp = sparse
        else:
            mlp = dense
        own = [] if kinds is None else kinds[part]
        widths = symbols | _widths(shape, part)
        prefix = f"{layout.get('prefix', _PREFIX)}{index}."
        found += rows([*layout["layer"], *own, *chosen, *mlp], prefix, widths)
    around = [name for row in layout.get("around_where", ()) for name in _chosen(row, shape)]
    found += (*rows([*layout["around"], *around], "", symbols), *encoder)
    return (
        None if any(parameter.elements == 0 for parameter in found) else tuple(found)
    )  # the file lacks a number


_PREFIX: Final = "model.layers."
_HEADS: Final = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}


def layer_parts(shape: ModelShape) -> tuple[str, ...]:
    """Return what decides each layer's parameters: its kind, or its letter or ratio."""
    pattern = shape.config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return tuple(pattern)
    ratios = shape.config.get("compress_ratios")
    if isinstance(ratios, list):
        return tuple(f"ratio {ratio}" for ratio in ratios[: shape.layers])
    types = shape.config.get("layers_block_type")
    if isinstance(types, list):
        return tuple(map(str, types))
    shared = shape.number("num_kv_shared_layers") or 0
    if not shared:
        return layer_kinds(shape)
    types = shape.config.get("layer_types")
    if not isinstance(types, list):
        return layer_kinds(shape)
    return tuple(
        str(kind) if index < shape.layers - shared else f"{kind} shared"
        for index, kind in enumerate(types)
    )


def _widths(shape: ModelShape, part: str) -> dict[str, int]:
    """Return the numbers of Gemma 4 that differ between layers.

    Layers of full attention have wider heads. Layers that share keys and values may have an MLP of
    twice the width.
    """
    found: dict[str, int] = {}
    if not shape.model_type.startswith(GEMMA4):
        return found
    if part.endswith("shared") and shape.config.get("use_double_wide_mlp"):
        found["I"] = 2 * (shape.number("intermediate_size") or 0)
    wide = shape.number("global_head_dim")
    if part.startswith("full") and wide:
        kv_heads = shape.kv_heads
        if shape.config.get("attention_k_eq_v"):
            kv_heads = shape.number("num_global_key_value_heads") or kv_heads
        found |= {"D": wide, "Q": shape.heads * wide, "K": kv_heads * wide}
    return found


def _dimension(text: str, symbols: Mapping[str, int], shape: ModelShape) -> int:
    """Compute a dimension whose symbols may also be keys of the configuration."""
    parts = [part.strip() for product in text.split("+") for part in product.split("*")]
    named = [part for part in parts if part not in symbols and not part.isdecimal()]
    return dimension(text, {**symbols, **{part: shape.number(part) or 0 for part in named}})


@functools.cache
def _tables() -> Mapping[str, Any]:
    return read_tables("layouts", [_FILE])[_FILE]


def _blocks() -> Mapping[str, Mapping[str, str]]:
    found: Mapping[str, Mapping[str, str]] = _tables()["blocks"]
    return found


@functools.cache
def _layouts() -> Mapping[str, Mapping[str, Any]]:
    return {kind: layout for layout in _tables()["layouts"] for kind in layout["types"]}


def _holds(layout: Mapping[str, Any], shape: ModelShape) -> bool:
    """Return whether the file has every field that the layout needs and none that it excludes."""
    if any(shape.config.get(name) for name in _BY_LAYER):
        return False
    if not _has_plain_mlps(layout, shape):
        return False
    if any(shape.number(name) is None for name in layout.get("needs", ())):
        return False
    return all(
        shape.config.get(name) in (None, value) for name, value in layout.get("plain", {}).items()
    )


def _has_plain_mlps(layout: Mapping[str, Any], shape: ModelShape) -> bool:
    """Return whether the file lists no other MLPs than the layout: dense ones, then sparse ones."""
    types = shape.config.get("mlp_layer_types")
    if not types:
        return True
    if "sparse_behind" not in layout:
        return False
    dense = shape.number(layout["sparse_behind"]) or 0
    return bool(types == ["dense"] * dense + ["sparse"] * (shape.layers - dense))


def _chosen(row: Mapping[str, Any], shape: ModelShape) -> list[str]:
    value = shape.config.get(row["field"])
    if value is None:
        value = row.get("default")
    blocks: list[str] = row["blocks"] if value else row.get("otherwise", [])
    return blocks


def _symbols(shape: ModelShape) -> dict[str, int]:
    def number(name: str) -> int:
        return shape.number(name) or 0

    delta = shape.config.get("linear_attn_config")
    delta = delta if isinstance(delta, Mapping) else {}
    return {
        "k": _count(delta, "num_heads") or 0,
        "d": _count(delta, "head_dim") or 0,
        "c": _count(delta, "short_conv_kernel_size") or 0,
        "H": shape.hidden,
        "V": shape.vocab,
        "N": shape.heads,
        "D": shape.head_dim,
        "Q": shape.heads * shape.head_dim,
        "K": shape.kv_heads * shape.head_dim,
        "K/D": shape.kv_heads,
        "I": number("intermediate_size"),
        "E": number("num_experts"),
        "M": number("moe_intermediate_size"),
        "X": number("n_shared_experts") or number("num_shared_experts"),
        "S": number("shared_expert_intermediate_size"),
        "A": number("q_lora_rank"),
        "C": number("kv_lora_rank"),
        "R": number("qk_rope_head_dim"),
        "P": number("qk_nope_head_dim"),
        "W": number("v_head_dim"),
        "U": shape.heads * shape.head_dim // (number("o_groups") or 1),
        "Y": number("intermediate_size") or 4 * shape.hidden,
        "F": _adjusted_width(shape),
        "O": shape.layers * number("hidden_size_per_layer_input"),
        "Z": (number("mamba_num_heads") or number("mamba_n_heads"))
        * (number("mamba_head_dim") or number("mamba_d_head")),
    }


def _adjusted_width(shape: ModelShape) -> int:
    """Return the MLP width of LFM2: two thirds, rounded up, unless the file turns that off."""
    width = shape.number("block_ff_dim") or shape.number("intermediate_size") or 0
    if shape.config.get("block_auto_adjust_ff_dim", True) is False:
        return width
    factor = shape.config.get("block_ffn_dim_multiplier", 1.0)
    if not isinstance(factor, int | float) or not 0 < factor < 100:
        return 0
    multiple = shape.number("block_multiple_of") or 256
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple
