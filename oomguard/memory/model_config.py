"""The few numbers of a model's ``config.json`` that decide memory; None where the architecture is not a plain one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Any of these in a configuration means that the plain formula (every layer keeps every token) does not hold.
_NOT_PLAIN: Final = (
    "kv_lora_rank",
    "layer_types",
    "sliding_window_pattern",
    "mamba_d_state",
    "ssm_state_size",
    "text_config",
)
_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer with full attention in every layer; sizes are counts, not bytes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype_bytes: int


def from_mapping(config: Mapping[str, Any]) -> ModelConfig | None:
    """The shape in a parsed ``config.json``; None where it is missing a number or is not a plain decoder."""
    if not _is_plain(config):
        return None
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not _is_count(heads) or not _is_count(hidden):
        return None
    assert isinstance(heads, int) and isinstance(hidden, int)  # noqa: S101, PT018 - just asked
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    values = (
        config.get("num_hidden_layers"), hidden, config.get("intermediate_size"), heads,
        heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"],
        hidden // heads if config.get("head_dim") is None else config["head_dim"], config.get("vocab_size"),
        _DTYPE_BYTES.get(dtype),
    )  # fmt: skip
    if not all(_is_count(value) for value in values):
        return None
    return ModelConfig(*values)  # type: ignore[arg-type]


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Whether every layer keeps every token: transformers 5 writes the layer types of plain models too."""
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return False
    if any(config.get(name) for name in _NOT_PLAIN if name != "layer_types"):
        return False
    types = config.get("layer_types")
    return not types or (isinstance(types, list) and all(name == "full_attention" for name in types))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_model_config(model: str) -> ModelConfig | None:
    """The shape of a model in a local folder; None for a hub name, an unreadable file or an architecture that is not plain."""
    try:
        raw = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return from_mapping(raw) if isinstance(raw, dict) else None
