"""By how much a planned pool may be off: its parts' own spread, widened until nine in ten of published starts lie inside.

benchmarks/fit_constants.py measures the factors, each group of a version and a device by the others, and writes them to fitted.toml.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from oomguard.memory.constants import pool_range
from oomguard.memory.model.layer_kinds import layer_kinds
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.start import VllmSettings


def kind_of_model(shape: ModelShape) -> str:
    """Return what a model's starts are told apart by: ``encoder``, ``mixed`` (experts, latent or recurrent layers) or ``dense``."""
    if shape.has_encoder:
        return "encoder"
    plain = set(layer_kinds(shape)) <= {"full", "sliding", "chunked"} and not shape.number("kv_lora_rank")
    return "dense" if plain and (shape.number("num_experts") or 0) <= 1 else "mixed"


def widened_bytes(shape: ModelShape, settings: VllmSettings, sources_bytes: Iterable[int]) -> int:
    """Return the range of a pool to either side, of the spreads of its independent parts."""
    known = pool_range(kind_of_model(shape))
    share = known["device_ratio"] * settings.gpu_total_bytes
    return round(known["factor"] * math.hypot(*sources_bytes, share))
