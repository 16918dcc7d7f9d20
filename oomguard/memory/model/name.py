"""What a model's name tells of its size: parameters and bits, for weights of which nothing else is at hand."""

from __future__ import annotations

import re
from typing import Final

# A mixture of experts written as 8x7B shares its attention: Mixtral-8x7B has 46.7 of 56, 8x22B has 141 of 176 billion.
_SHARED_EXPERTS_RATIO: Final = 0.82
_EXPERTS: Final = re.compile(r"(?i)(?<![\w.])(\d{1,3})x(\d{1,4}(?:\.\d{1,3})?)b(?![a-z])")
_BILLIONS: Final = re.compile(r"(?i)(?<![\w.])(?:a)?(\d{1,4}(?:\.\d{1,3})?)b(?![a-z])")
_ACTIVE: Final = re.compile(r"(?i)(?<![\w.])a\d+(?:\.\d+)?b(?![a-z])")
_REVISION: Final = re.compile(r"[0-9a-f]{40}")
_BITS: Final = (
    (re.compile(r"(?i)int-?8|(?<!\d)8-?bit"), 8.5),  # before the methods' names: AWQ and GPTQ come in 8 bits too
    (re.compile(r"(?i)awq|gptq|bnb-?4bit|4-?bit|int4|w4a16|nf4|nvfp4|mxfp4|fp4|q4_|q4-|iq4"), 4.5),
    (re.compile(r"(?i)fp8|w8a8|w8a16|q8_"), 8.5),
    (re.compile(r"(?i)q6_|(?<!\d)6-?bit"), 6.6),
    (re.compile(r"(?i)q5_|(?<!\d)5-?bit"), 5.6),
    (re.compile(r"(?i)q[23]_|(?<!\d)[23]-?bit"), 3.2),
)


def parameters_from_name(model: str) -> float | None:
    """Return the parameters that a name tells: 32e9 for Qwen3-32B, 144e9 for 8x22B, 30e9 for 30B-A3B; None without a size.

    Of a path the last part with a size counts; a revision's hash has none.
    """
    parts = [part for part in reversed(model.split("/")) if not _REVISION.fullmatch(part)]
    return next((size for part in parts if (size := _parameters(part.replace("_", "-"))) is not None), None)


def _parameters(name: str) -> float | None:
    experts = _EXPERTS.search(name)
    if experts:
        return int(experts.group(1)) * float(experts.group(2)) * 1e9 * _SHARED_EXPERTS_RATIO
    sizes = [float(size) for size in _BILLIONS.findall(_ACTIVE.sub("", name))]
    return max(sizes) * 1e9 if sizes else None


def bits_from_name(model: str) -> float | None:
    """Return the bits of a parameter with its scales where the name tells that the weights are quantised, else None."""
    return next((bits for pattern, bits in _BITS if pattern.search(model)), None)


def bits_of_dtype(dtype: str | None) -> float:
    """Return the bits of a parameter in a data type; half precision, which engines load, where none is named."""
    return 32.0 if dtype and dtype.removeprefix("torch.") in {"float32", "float"} else 16.0
