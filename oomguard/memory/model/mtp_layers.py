"""The layers that predict further tokens (MTP), of a model whose configuration alone is there: no family's decoder builds them.

Each is as large as the last layer of the decoder, in half precision where a quantised checkpoint leaves it alone, beside the
projection of the embedding and the hidden state that it starts from; embedding and head are the decoder's own.
Sources: vllm/model_executor/models/deepseek_mtp.py and qwen3_5_mtp.py of 0.27.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.quantized import quantizes_mtp
from oomguard.memory.model.shape import ModelShape

_COUNTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_MOST_LAYERS: Final = 8
_OF_AN_ENCODER: Final = re.compile(r"vision|visual|audio|encoder\.")


def mtp_layers(parameters: Sequence[Parameter], shape: ModelShape) -> tuple[Parameter, ...]:
    """Return the parameters of a model's MTP layers, named as the layers behind its last; none where it has none.

    Args:
        parameters: the decoder's own, as they are loaded.
        shape: the model's numbers.
    """
    count = next((number for name in _COUNTS if (number := shape.number(name))), 0)
    last = re.compile(rf"(?:^|\.)layers\.{shape.layers - 1}\.")
    own = [p for p in parameters if last.search(p.name) and not _OF_AN_ENCODER.search(p.name)]
    if not own or not 0 < count <= _MOST_LAYERS:
        return ()
    if not quantizes_mtp(shape):
        own = [replace(p, bytes=p.elements * shape.dtype_bytes) for p in own]
    found = []
    for index in range(shape.layers, shape.layers + count):
        found += [replace(p, name=last.sub(f"model.layers.{index}.", p.name)) for p in own]
        size = (shape.hidden, 2 * shape.hidden)
        found.append(Parameter(f"model.layers.{index}.eh_proj.weight", size, 2 * shape.hidden**2 * shape.dtype_bytes))
    return tuple(found)
