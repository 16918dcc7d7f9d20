"""GGUF: what a file of it weighs, and a model's parameters packed as in one. An engine keeps its tensors packed on the device.

Source: GGUFLinearMethod and GGUFEmbeddingMethod in vllm/model_executor/layers/quantization/gguf.py, 0.8.2; 3.26 GiB printed there of a
Llama-3.2-3B whose Q8_0 file has 3.18 GiB, the table of its positions among them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from oomguard.memory.model.headers import Parameter

SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def gguf_bytes(path: Path) -> int | None:
    """Return the bytes of a GGUF file, or of the only one in a folder, its parts together; None without one, or with several."""
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path] if path.suffix == SUFFIX else []
    models = {_PART.sub("", file.name) for file in files}
    return sum(file.stat().st_size for file in files) if len(models) == 1 else None


def packed(parameters: Sequence[Parameter], file_bytes: int) -> tuple[Parameter, ...]:
    """Return parameters that take what the file has in all, each by its share of the elements.

    Formats differ from tensor to tensor; how the whole is shared out among them matters to ranks and stages only.
    """
    elements = sum(parameter.elements for parameter in parameters)
    return tuple(replace(p, bytes=round(p.elements * file_bytes / elements)) for p in parameters)
