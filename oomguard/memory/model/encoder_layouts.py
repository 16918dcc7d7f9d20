"""A vision encoder's parameters by its model's type, without building it: names and dimensions are data, in encoder_layouts.toml."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.shape import ModelShape, is_count
from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("encoder_layouts.toml")
_SYMBOL: Final = re.compile(r"[A-Z]")
_COLORS: Final = 3


def laid_out_encoder(shape: ModelShape) -> tuple[Parameter, ...] | None:
    """Return the parameters of a model's vision encoder, of its projector too; None where no layout has its type."""
    layout, vision = _layouts().get(str(shape.outer.get("model_type"))), shape.outer.get("vision_config")
    if layout is None or not isinstance(vision, Mapping):
        return None
    symbols = {"H": shape.hidden, **_symbols(shape.outer, vision)}
    blocks = [layout["layer"], *(block for field, block in layout["where"].items() if vision.get(field))]
    layers, needed = _count(vision, "num_hidden_layers"), _SYMBOL.findall(" ".join(_texts(blocks, layout["around"])))
    if layers is None or not set(needed) <= set(symbols):
        return None

    def rows(block: Mapping[str, str], prefix: str) -> Iterator[Parameter]:
        for name, text in block.items():
            size = tuple(dimension(part, symbols) for part in text.split(","))
            yield Parameter(prefix + name, size, prod(size) * shape.dtype_bytes)

    found = [row for i in range(layers) for block in blocks for row in rows(block, f"{layout['prefix']}{i}.")]
    return (*found, *rows(layout["around"], ""))


def _symbols(outer: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, int]:
    """Return the symbols whose numbers a configuration has."""
    patch, side, merge = (_count(vision, name) for name in ("patch_size", "image_size", "spatial_merge_size"))
    width, ratio = _count(vision, "embed_dim") or _count(vision, "hidden_size"), outer.get("downsample_ratio")
    share = ratio if isinstance(ratio, float) and 0 < ratio <= 1 else None
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
    return value if is_count(value) and value > 0 else None


def _texts(blocks: Iterable[Mapping[str, str]], around: Mapping[str, str]) -> Iterator[str]:
    for block in (*blocks, around):
        yield from block.values()


def dimension(text: str, symbols: Mapping[str, int]) -> int:
    """Return a dimension of a layout, a sum of products of symbols and counts."""
    products = ([part.strip() for part in product.split("*")] for product in text.split("+"))
    return sum(prod(symbols[part] if part in symbols else int(part) for part in product) for product in products)


@functools.cache
def _layouts() -> Mapping[str, Mapping[str, Any]]:
    return {
        kind: layout
        for layout in read_tables("encoder_layouts", [_FILE])[_FILE]["encoders"]
        for kind in layout["types"]
    }
