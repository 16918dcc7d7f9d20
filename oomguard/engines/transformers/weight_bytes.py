"""The bytes of a model's weights by layer, from the headers of its checkpoint or from the modules themselves."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from oomguard.errors import OomguardError
from oomguard.memory.generate.closed_form import generate_row_bytes
from oomguard.memory.model.files import ModelFiles
from oomguard.memory.model.model import read_model
from oomguard.memory.model.shape import ModelShape, read_shape
from oomguard.remedy.modelled_load import Weights

# Beside the weights there is to be room for a row as long as this, or as long as the model reads.
WORK_TOKENS: Final = 1024
_LAYER: Final = re.compile(r"^(.*?\.?(?:layers?|h|blocks?|layer_stack)\.\d+)\.")


def weights_of(files: ModelFiles, dtype: str, quantization: str | None = None) -> Weights | None:
    """Return the weights of a checkpoint as they are loaded with a data type; None where its files do not tell."""
    own = dtype if dtype in _KNOWN else _named_dtype(files)
    try:
        model = read_model(files, dtype=own or "auto", quantization=quantization)
    except OomguardError:
        return None
    if own is None and quantization is None and files.parameters is not None:
        return _weights(((p.name, p.bytes) for p in files.parameters), model.shape)
    if files.parameters is None and not model.exact:
        return None
    return _weights(((p.name, p.bytes) for p in model.parameters), model.shape)


def _named_dtype(files: ModelFiles) -> str | None:
    """Return the data type that the configuration names; None where it names none: each tensor is loaded as it is in its file."""
    parts = (files.config, *(part for part in files.config.values() if isinstance(part, dict)))
    named = (str(part.get("dtype") or part.get("torch_dtype")) for part in parts)
    return next((name for name in named if name in _KNOWN), None)


def weights_in(model: Any) -> Weights:
    """Return the weights of a model that is made."""
    sizes = {name: tensor.nbytes for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    try:
        shape = read_shape(model.config.to_dict())
    except (OomguardError, AttributeError):
        shape = None
    return _weights(sizes.items(), shape)


def _weights(sizes: Iterable[tuple[str, int]], shape: ModelShape | None) -> Weights:
    blocks: defaultdict[str, int] = defaultdict(int)
    for name, size in sizes:
        found = _LAYER.match(name)
        blocks[found.group(1) if found else name.rpartition(".")[0]] += size
    tokens = min(WORK_TOKENS, (shape.max_positions or WORK_TOKENS) if shape is not None else WORK_TOKENS)
    return Weights(sum(blocks.values()), max(blocks.values(), default=0), _work_bytes(shape, tokens), tokens)


def _work_bytes(shape: ModelShape | None, tokens: int) -> int:
    """Return what a row takes beside the weights: by the closed form, and by its sizes where that does not hold."""
    if shape is None:
        return 0
    try:
        return generate_row_bytes(shape, tokens - 1, 1)
    except OomguardError:
        return tokens * shape.dtype_bytes * (2 * shape.layers * shape.kv_heads * shape.head_dim + 16 * shape.hidden)


_KNOWN: Final = frozenset({"float32", "float16", "bfloat16"})
