"""A decoder's parameters by its type's layout, without building it: names and dimensions are data, in layouts.toml.

transformers builds the same in seconds, once it and torch are imported; a plan needs neither where a layout has the type.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from oomguard.memory.model.encoder_layouts import dimension, laid_out_encoder
from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.shape import ModelShape
from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("layouts.toml")
# Fields with which transformers lays single layers out otherwise.
_BY_LAYER: Final = ("mlp_layer_types", "per_layer_config", "block_configs")


def laid_out(shape: ModelShape, *, tied: bool) -> tuple[Parameter, ...] | None:
    """Return every parameter of a decoder, and of its encoder; None where no layout has a type, or the file says what none holds.

    Args:
        shape: the model's numbers.
        tied: whether the embedding is the head.
    """
    layout = _layouts().get(shape.model_type)
    encoder = laid_out_encoder(shape) if shape.has_encoder else ()
    if layout is None or encoder is None or not _holds(layout, shape):
        return None
    symbols, blocks = _symbols(shape), _blocks()

    def rows(names: list[str], prefix: str) -> Iterator[Parameter]:
        for name in names:
            for tensor, dimensions in blocks[name].items():
                size = tuple(dimension(text, symbols) for text in dimensions.split(","))
                yield Parameter(prefix + tensor, size, prod(size) * shape.dtype_bytes)

    chosen = [name for row in layout.get("where", ()) for name in _chosen(row, shape)]
    dense = layout.get("dense", [])
    sparse = layout.get("sparse", dense)
    behind = shape.number(layout["sparse_behind"]) or 0 if "sparse_behind" in layout else 0
    heads = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    table = (shape.vocab, shape.hidden)
    found = [Parameter(name, table, prod(table) * shape.dtype_bytes) for name in heads]
    for index in range(shape.layers):
        mlp = sparse if index >= behind else dense
        found += rows([*layout["layer"], *chosen, *mlp], f"model.layers.{index}.")
    found += (*rows(layout["around"], ""), *encoder)
    return None if any(parameter.elements == 0 for parameter in found) else tuple(found)  # a number is not in the file


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
    """Whether the file says all that the layout needs, and nothing that it leaves out."""
    if any(shape.config.get(name) for name in _BY_LAYER):
        return False
    if any(shape.number(name) is None for name in layout.get("needs", ())):
        return False
    return all(shape.config.get(name) in (None, value) for name, value in layout.get("plain", {}).items())


def _chosen(row: Mapping[str, Any], shape: ModelShape) -> list[str]:
    said = shape.config.get(row["field"])
    blocks: list[str] = row["blocks"] if (row.get("default") if said is None else said) else row.get("otherwise", [])
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
