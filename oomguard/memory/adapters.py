"""Bytes that LoRA adapters take on each rank: slots are laid out for all of them before the first one is loaded.

Each cut layer gets one slot per adapter: A of rank by its inputs, B of its outputs by rank; of a layer cut by its outputs A is
whole, of one cut by its inputs B is (vllm/lora/layers/column_parallel_linear.py and row_parallel_linear.py, 0.32, not fully sharded).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from oomguard.memory.model_files import Parameter
from oomguard.memory.weights import stage_of

_LINEAR: Final = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")
_SKIPPED: Final = re.compile(r"norm|\.gate\.weight$|\.router\b|conv1d|A_log|\.D$|embed")
_ROWS: Final = re.compile(r"\.(?:o_proj|down_proj|out_proj|dense|c_proj|fc2|w2|dense_4h_to_h)\b")
_MATRIX, _EXPERTS = 2, 3


def adapter_bytes(
    parameters: Iterable[Parameter], layers: int, stages: int, *, slots: int, rank: int, tensor_parallel_size: int, element_bytes: int
) -> tuple[int, ...]:  # fmt: skip
    """Bytes on each pipeline stage's ranks for ``slots`` adapters of up to ``rank``."""
    totals = [0.0] * stages
    for parameter in parameters:
        if not _LINEAR.search(parameter.name) or _SKIPPED.search(parameter.name) or len(parameter.shape) < _MATRIX:
            continue
        experts = parameter.shape[0] if len(parameter.shape) == _EXPERTS else 1
        outputs, inputs = parameter.shape[-2:]
        if _ROWS.search(parameter.name):
            elements = rank * inputs / tensor_parallel_size + rank * outputs
        else:
            elements = rank * inputs + rank * outputs / tensor_parallel_size
        totals[stage_of(parameter.name, layers, stages)] += slots * experts * elements * element_bytes
    return tuple(round(total) for total in totals)
