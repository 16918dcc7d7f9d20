"""A vision encoder's parameters by its model's type, without building it: names and dimensions are data, in encoder_layouts.toml."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.shape import ModelShape, is_count
from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("encoder_layouts.toml")
_NUMBERS: Final = ("num_hidden_layers", "hidden_size", "intermediate_size", "image_size", "patch_size")
_COLORS: Final = 3


def laid_out_encoder(shape: ModelShape) -> tuple[Parameter, ...] | None:
    """Return the parameters of a model's vision encoder, of its projector too; None where no layout has its type."""
    layout, vision = _layouts().get(str(shape.outer.get("model_type"))), shape.outer.get("vision_config")
    if layout is None or not isinstance(vision, Mapping):
        return None
    counts = [n for name in _NUMBERS if is_count(n := vision.get(name)) and n > 0]
    ratio = shape.outer.get("downsample_ratio")
    if len(counts) != len(_NUMBERS) or not isinstance(ratio, float) or not 0 < ratio <= 1:
        return None
    layers, width, mlp, side, patch = counts
    symbols = {
        "W": width,
        "I": mlp,
        "C": _COLORS * patch**2,
        "P": (side // patch) ** 2 + 1,
        "S": round(width / ratio**2),
        "H": shape.hidden,
    }
    blocks = [layout["layer"], *(block for field, block in layout["where"].items() if vision.get(field))]

    def rows(block: Mapping[str, str], prefix: str) -> Iterator[Parameter]:
        for name, text in block.items():
            size = tuple(dimension(part, symbols) for part in text.split(","))
            yield Parameter(prefix + name, size, prod(size) * shape.dtype_bytes)

    found = [row for i in range(layers) for block in blocks for row in rows(block, f"{layout['prefix']}{i}.")]
    return (*found, *rows(layout["around"], ""))


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
