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
from oomguard.estimate.model.shape import ModelShape, is_count
from oomguard.estimate.model.weight_headers import Parameter

# A vision encoder's parameters come from encoder_layouts.toml in the same way.

_ENCODER_LAYOUTS_FILE: Final = Path(__file__).with_name("encoder_layouts.toml")
_SYMBOL: Final = re.compile(r"[A-Z]")
_COLORS: Final = 3


def encoder_parameters_from_layout(shape: ModelShape) -> tuple[Parameter, ...] | None:
    """Return the parameters of a model's vision encoder and its projector.

    Returns None if no layout covers its type.
    """
    layout = _encoder_layouts_layouts().get(str(shape.outer.get("model_type")))
    vision = shape.outer.get("vision_config")
    if layout is None or not isinstance(vision, Mapping):
        return None
    symbols = {"H": shape.hidden, **_encoder_layouts_symbols(shape.outer, vision)}
    blocks = [
        layout["layer"],
        *(block for field, block in layout["where"].items() if vision.get(field)),
    ]
    layers = _count(vision, "num_hidden_layers")
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
    return (*found, *rows(layout["around"], ""))


def _encoder_layouts_symbols(outer: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout symbols that the configuration has numbers for."""
    patch, side, merge = (
        _count(vision, name) for name in ("patch_size", "image_size", "spatial_merge_size")
    )
    width = _count(vision, "embed_dim") or _count(vision, "hidden_size")
    ratio = outer.get("downsample_ratio")
    if isinstance(ratio, float) and 0 < ratio <= 1:
        share = ratio
    else:
        share = None
    found = {
        "W": width,
        "I": _count(vision, "intermediate_size"),
        "C": patch and _COLORS * patch**2,
        "P": patch and side and (side // patch) ** 2 + 1,
        "M": width and merge and width * merge**2,
        "S": width and share and round(width / share**2),
    }
    return {symbol: number for symbol, number in found.items() if number}


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
def _encoder_layouts_layouts() -> Mapping[str, Mapping[str, Any]]:
    return {
        kind: layout
        for layout in read_tables("encoder_layouts", [_ENCODER_LAYOUTS_FILE])[
            _ENCODER_LAYOUTS_FILE
        ]["encoders"]
        for kind in layout["types"]
    }


_FILE: Final = Path(__file__).with_name("layouts.toml")
# transformers builds single layers differently if one of these fields is set.
_BY_LAYER: Final = ("mlp_layer_types", "per_layer_config", "block_configs")


def parameters_from_layout(shape: ModelShape, *, tied: bool) -> tuple[Parameter, ...] | None:
    """Return every parameter of a decoder and its encoder.

    Returns None if no layout covers a type, or the file has a field that no layout covers.

    Args:
        shape: the model's numbers.
        tied: whether the head reuses the embedding.
    """
    layout = _layouts().get(shape.model_type)
    if shape.has_encoder:
        encoder = encoder_parameters_from_layout(shape)
    else:
        encoder = ()
    if layout is None or encoder is None or not _holds(layout, shape):
        return None
    symbols = _symbols(shape)
    blocks = _blocks()

    def rows(names: list[str], prefix: str) -> Iterator[Parameter]:
        for name in names:
            for tensor, dimensions in blocks[name].items():
                size = tuple(dimension(text, symbols) for text in dimensions.split(","))
                yield Parameter(prefix + tensor, size, prod(size) * shape.dtype_bytes)

    chosen = [name for row in layout.get("where", ()) for name in _chosen(row, shape)]
    dense = layout.get("dense", [])
    sparse = layout.get("sparse", dense)
    if "sparse_behind" in layout:
        behind = shape.number(layout["sparse_behind"]) or 0
    else:
        behind = 0
    heads = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    table = (shape.vocab, shape.hidden)
    found = [Parameter(name, table, prod(table) * shape.dtype_bytes) for name in heads]
    for index in range(shape.layers):
        if index >= behind:
            mlp = sparse
        else:
            mlp = dense
        found += rows([*layout["layer"], *chosen, *mlp], f"model.layers.{index}.")
    found += (*rows(layout["around"], ""), *encoder)
    return (
        None if any(parameter.elements == 0 for parameter in found) else tuple(found)
    )  # the file lacks a number


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
    if any(shape.number(name) is None for name in layout.get("needs", ())):
        return False
    return all(
        shape.config.get(name) in (None, value) for name, value in layout.get("plain", {}).items()
    )


def _chosen(row: Mapping[str, Any], shape: ModelShape) -> list[str]:
    value = shape.config.get(row["field"])
    if value is None:
        value = row.get("default")
    blocks: list[str] = row["blocks"] if value else row.get("otherwise", [])
    return blocks


def _symbols(shape: ModelShape) -> dict[str, int]:
    def number(name: str) -> int:
        return shape.number(name) or 0

    return {
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
        "X": number("n_shared_experts"),
        "S": number("shared_expert_intermediate_size"),
        "A": number("q_lora_rank"),
        "C": number("kv_lora_rank"),
        "R": number("qk_rope_head_dim"),
        "P": number("qk_nope_head_dim"),
        "W": number("v_head_dim"),
    }
