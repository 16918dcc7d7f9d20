"""Bytes that LoRA takes on each rank: the slots of all adapters are laid out before the first one is loaded.

Each matrix gets one slot per adapter: A of rank by its inputs, B of its outputs by rank. Of a matrix sharded by its outputs A is
replicated, of one sharded by its inputs B is (vllm/lora/layers/column_parallel_linear.py and row_parallel_linear.py, 0.32, not
fully sharded). The families of lora_around.toml have them around their layers too: for the embedding A of vocabulary by rank and
B of width by rank, for the output head the same, whole on every rank (vocab_parallel_embedding.py, logits_processor.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.sharded_weights import stage_of
from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("lora_around.toml")
_LINEAR: Final = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")
_SKIPPED: Final = re.compile(r"norm|\.gate\.weight$|\.router\b|conv1d|A_log|\.D$|embed")
_ROWS: Final = re.compile(r"\.(?:o_proj|down_proj|out_proj|dense|c_proj|fc2|w2|dense_4h_to_h)\b")
_MATRIX, _EXPERTS = 2, 3


def lora_bytes(
    parameters: Iterable[Parameter],
    layers: int,
    stages: int,
    *,
    slots: int,
    rank: int,
    tensor_parallel_size: int,
    element_bytes: int,
    around_elements: int = 0,
) -> tuple[int, ...]:
    """Return the bytes on one rank of each pipeline stage.

    Args:
        parameters: the model's parameters.
        layers: how many layers it has.
        stages: pipeline stages that share them.
        slots: adapters at once.
        rank: the largest rank of an adapter.
        tensor_parallel_size: ranks that share each layer.
        element_bytes: bytes of an element of the adapters.
        around_elements: elements of one rank of the embedding's, and of the head's: see ``around_elements``.
    """
    totals = [0.0] * stages
    for end in (0, -1):  # the embedding is on the first stage, the head on the last
        totals[end] += slots * rank * around_elements * element_bytes
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


def around_elements(shape: ModelShape) -> int:
    """Return the elements of one rank of an adapter for the embedding, as many for the head; 0 where vLLM adapts neither."""
    return shape.vocab + shape.hidden if shape.model_type in _adapted_around() else 0


@cache
def _adapted_around() -> frozenset[str]:
    return frozenset(next(iter(read_tables("lora_around", [_FILE]).values()))["model_types"])
