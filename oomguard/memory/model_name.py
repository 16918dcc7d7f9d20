"""What a model's name says of its size: parameters and bits, to judge weights before anything of the model is at hand."""

from __future__ import annotations

import re
from typing import Final

# A mixture of experts written as 8x7B shares its attention: Mixtral-8x7B has 46.7 of 56, 8x22B has 141 of 176 billion.
_SHARED_EXPERTS_RATIO: Final = 0.82
_EXPERTS: Final = re.compile(r"(?i)(?<![\w.])(\d{1,3})x(\d+(?:\.\d+)?)b(?![a-z])")
_BILLIONS: Final = re.compile(r"(?i)(?<![\w.])(?:a)?(\d+(?:\.\d+)?)b(?![a-z])")
_ACTIVE: Final = re.compile(r"(?i)(?<![\w.])a\d+(?:\.\d+)?b(?![a-z])")
_BITS: Final = (
    (re.compile(r"(?i)awq|gptq|bnb-?4bit|4-?bit|int4|w4a16|nf4|nvfp4|mxfp4|fp4|q4_|q4-|iq4"), 4.5),
    (re.compile(r"(?i)8-?bit|int8|fp8|w8a8|w8a16|q8_"), 8.5),
    (re.compile(r"(?i)q[23]_|[23]-?bit"), 3.2),
)  # fmt: skip


def parameters_from_name(model: str) -> float | None:
    """The parameters that a name tells: 32e9 for Qwen3-32B, 141e9 for 8x22B, 30e9 for 30B-A3B; None where it tells none."""
    name = re.sub(r"[_/]", "-", model)
    experts = _EXPERTS.search(name)
    if experts:
        return int(experts.group(1)) * float(experts.group(2)) * 1e9 * _SHARED_EXPERTS_RATIO
    sizes = [float(size) for size in _BILLIONS.findall(_ACTIVE.sub("", name))]
    return max(sizes) * 1e9 if sizes else None


def bits_from_name(model: str) -> float | None:
    """Bits of a parameter with its scales, where the name says that the weights are quantised; None where it does not."""
    return next((bits for pattern, bits in _BITS if pattern.search(model)), None)


def bits_of_dtype(dtype: str | None) -> float:
    """Bits of a parameter in a data type; half precision where nothing is said, which is what engines load."""
    return 32.0 if dtype and dtype.removeprefix("torch.") in {"float32", "float"} else 16.0
