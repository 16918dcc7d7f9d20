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


def kind_of_start(shape: ModelShape, settings: VllmSettings) -> str:
    """Return what starts are told apart by: ``several`` GPUs, ``plain`` for a dense model of text on one of its own, else ``other``.

    Else are experts, latent or recurrent layers, encoders and memory that the host's programs share.
    """
    if settings.tensor_parallel_size * settings.pipeline_parallel_size > 1:
        return "several"
    dense = set(layer_kinds(shape)) <= {"full", "sliding", "chunked"} and not shape.number("kv_lora_rank")
    experts = (shape.number("num_experts") or 0) > 1
    return "plain" if not settings.unified_memory and dense and not experts and not shape.has_encoder else "other"


def widened_bytes(shape: ModelShape, settings: VllmSettings, sources_bytes: Iterable[int]) -> int:
    """Return the range of a pool to either side, of the spreads of its independent parts."""
    known = pool_range(kind_of_start(shape, settings))
    share = known["device_ratio"] * settings.gpu_total_bytes
    return round(known["factor"] * math.hypot(*sources_bytes, share))
