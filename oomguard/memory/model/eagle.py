"""The parameters of an EAGLE head by its configuration alone, which reads as a decoder of one layer.

It looks words up in the target's embedding, EAGLE also ends in the target's head. EAGLE-3 has a head of its own vocabulary, a projection
of three of the target's hidden states, and a first layer whose attention reads the embedding beside the hidden state.
Sources: vllm/model_executor/models/llama_eagle.py and llama_eagle3.py, vllm/v1/spec_decode/eagle.py of 0.30.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.shape import ModelShape

METHODS: Final = frozenset({"eagle", "eagle3"})
_EMBEDDING: Final = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_HEAD: Final = re.compile(r"(?:^|\.)lm_head\.weight$")
_FIRST_INPUTS: Final = re.compile(r"\.layers\.0\.self_attn\.(?:q|k|v)_proj\.weight$")
_AUXILIARY_STATES: Final = 3


def eagle_parameters(parameters: Sequence[Parameter], shape: ModelShape, method: str) -> Iterator[Parameter]:
    """Yield the parameters that a head holds beside its target.

    Args:
        parameters: those of the decoder that its configuration reads as.
        shape: the head's numbers.
        method: ``eagle`` or ``eagle3``.
    """
    own_head, states = method == "eagle3", _AUXILIARY_STATES if method == "eagle3" else 2
    target = shape.number("target_hidden_size") or shape.hidden if own_head else shape.hidden
    for parameter in parameters:
        if _EMBEDDING.search(parameter.name) or (_HEAD.search(parameter.name) and not own_head):
            continue
        if _HEAD.search(parameter.name):
            yield _matrix(parameter.name, shape.number("draft_vocab_size") or shape.vocab, shape.hidden, shape)
        elif own_head and _FIRST_INPUTS.search(parameter.name):
            yield _matrix(parameter.name, parameter.shape[0], 2 * shape.hidden, shape)
        else:
            yield parameter
    yield _matrix("model.fc.weight", shape.hidden, states * target, shape)


def _matrix(name: str, rows: int, columns: int, shape: ModelShape) -> Parameter:
    return Parameter(name, (rows, columns), rows * columns * shape.dtype_bytes)
