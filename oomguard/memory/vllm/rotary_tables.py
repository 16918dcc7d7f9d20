"""Tables of cosines and sines that a start makes of its positions: one for all layers with the same positions, whole on each rank.

Sources: get_rope in vllm/model_executor/layers/rotary_embedding of 0.7.3 to 0.27.1, and Gemma4Attention in models/gemma4.py of 0.27.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomguard.memory.model.families import FAMILIES
from oomguard.memory.model.layer_kinds import GEMMA4
from oomguard.memory.model.shape import MAX_COUNT, ModelShape, rope_factor, rope_kind, rope_scaling

# Positions in time, height and width: the table spans four times the length (MRotaryEmbedding, cache_max_position_num).
_LENGTHS_OF_SECTIONS: Final = 4
# "Proportional" positions turn a share of each head's elements, and have a table of them all (gemma4_rope.py).
_OF_WHOLE_HEADS: Final = "proportional"
# Positions that are stretched evenly have a table of the stretched length (linear_scaling_rope.py), also where the file has written that
# length down as the model's own (Gemma 3): there the table spans eight times the length.
_STRETCHED: Final = "linear"


def rotary_bytes(shape: ModelShape) -> int:
    """Return the bytes of all tables of a model."""
    if shape.model_type in FAMILIES["types"]["without_rotary"] or shape.max_positions is None:
        return 0
    by_kind = [rope for rope in rope_scaling(shape.config).values() if isinstance(rope, Mapping)]
    if by_kind:
        kinds = rope_scaling(shape.config).items()
        return sum(_rows(shape, rope) * _columns(shape, kind, rope) for kind, rope in kinds) * shape.dtype_bytes
    columns = shape.number("qk_rope_head_dim") or round(shape.head_dim * _rotary_share(shape.config))
    local = shape.max_positions if shape.config.get("rope_local_base_freq") else 0
    lengths = _LENGTHS_OF_SECTIONS if _in_sections(shape) else 1
    return (lengths * _table_positions(shape) + local) * columns * shape.dtype_bytes


def _rows(shape: ModelShape, rope: Any) -> int:
    """Return the rows of the table for one kind of layers, where the file has positions for each kind."""
    stretched = isinstance(rope, Mapping) and rope.get("rope_type") == _STRETCHED
    return round((shape.max_positions or 0) * (rope_factor({"rope_parameters": rope}) if stretched else 1.0))


def _columns(shape: ModelShape, kind: str, rope: Any) -> int:
    """Return the columns of the table for one kind of layers, where the file has positions for each kind."""
    if not isinstance(rope, Mapping):
        return 0
    wide = shape.number("global_head_dim") if shape.model_type.startswith(GEMMA4) and kind.startswith("full") else None
    share = 1.0 if rope.get("rope_type") == _OF_WHOLE_HEADS else _share_of(rope)
    return round((wide or shape.head_dim) * (share or 1.0))


def _in_sections(shape: ModelShape) -> bool:
    """Whether positions have a section each for time, height and width."""
    kinds = tuple(FAMILIES["types"]["rotary_encoders"])
    return "mrope_section" in rope_scaling(shape.config) or str(shape.outer.get("model_type")).startswith(kinds)


def _rotary_share(config: Mapping[str, Any]) -> float:
    return _share_of(config) or _share_of(rope_scaling(config)) or 1.0


def _share_of(part: Mapping[str, Any]) -> float | None:
    """Return the share of a head's elements that turn with the position, None where the file does not say."""
    for name in ("partial_rotary_factor", "rotary_pct", "rotary_percent"):
        value = part.get(name)
        if isinstance(value, (int, float)) and 0 < value <= 1:
            return float(value)
    return None


def _table_positions(shape: ModelShape) -> int:
    """Count the rows of a table: YaRN's and a linear one span the stretched length, LongRoPE has a short table and a long one."""
    positions = shape.max_positions or 0
    original = rope_scaling(shape.config).get("original_max_position_embeddings")
    known = original if isinstance(original, int) and 0 < original <= MAX_COUNT else None
    kind = rope_kind(shape.config)
    if kind in {"yarn", "deepseek_yarn"} and known:
        return max(1, round(known * rope_factor(shape.config)))
    if kind == _STRETCHED:
        return round((shape.number("max_position_embeddings") or positions) * rope_factor(shape.config))
    if kind == "longrope":
        return positions + (shape.default_length or 0)
    return positions
