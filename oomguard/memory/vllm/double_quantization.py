"""bitsandbytes' scales by version: quantised once more, or unpacked while the weights are loaded.

A checkpoint may hold its scales in eight bits, and the engine makes such ones of half precision itself; from 0.9 on it unpacks both.
Sources: quantize_4bit in vllm/model_executor/model_loader/loader.py of 0.7.3 to 0.8.5, _dequantize_dq in bitsandbytes_loader.py of 0.9.2.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

from packaging.version import Version

from oomguard.memory.constants import since
from oomguard.memory.model.model import Model
from oomguard.memory.model.quantized import quantization_config

# Bits of an element with a scale of four bytes, or of one and a share of another, for each 64.
_PLAIN_BITS, _DOUBLE_BITS = 4 + 32 / 64, 4 + 8 / 64 + 32 / (64 * 256)
_METHOD: Final = "bitsandbytes"


def with_scales_of_version(model: Model, version: Version, quantization: str | None) -> Model:
    """Return a model with the bytes that weights of bitsandbytes take in a version; any other model as it is."""
    config = quantization_config(model.shape) or {}
    if _METHOD not in (config.get("quant_method"), quantization) or config.get("load_in_8bit"):
        return model
    read_double = bool(config.get("bnb_4bit_use_double_quant"))
    holds_double = (read_double or not config) and not since("scales_unpacked_since", version)
    return model if read_double == holds_double else _changed(model, holds_double)


@functools.lru_cache(maxsize=4)
def _changed(model: Model, holds_double: bool) -> Model:
    old, new = (_PLAIN_BITS, _DOUBLE_BITS) if holds_double else (_DOUBLE_BITS, _PLAIN_BITS)
    parameters = (
        replace(p, bytes=round(p.elements * new / 8)) if p.bytes == round(p.elements * old / 8) else p
        for p in model.parameters
    )
    return replace(model, parameters=tuple(parameters))
