"""The records of a call of ``generate`` before it is made: its numbers, and where the bytes of the
GPU go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oomguard.core.records import Record


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """The numbers of one call of ``generate``; ``config`` is the model's, ``dtype`` torch's name
    for the type of the weights.
    """

    config: Mapping[str, Any]
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    num_beams: int = 1
    attn_implementation: str = "sdpa"
    cache_implementation: str | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, repr=False)
class CallBudget(Record):
    """The budget of one call of transformers' ``generate`` on one GPU, in bytes.

    Attributes:
        weights_bytes: the weights.
        kv_bytes_per_token: one token of one row in all layers.
        kv_cache_bytes: the cache at the end of the call.
        peak_bytes: the most that is allocated at once, weights included.
        reserved_bytes: what torch's caching allocator holds then.
        cuda_context_bytes: the CUDA context.
        largest_batch_size: how many rows would fit, 0 where not one does.
        uncertainty_bytes: by how much the peak may be off, to either side.
        traced: whether the model's own code was run under fake tensors.
        assumptions: what was neither given nor read, a line each.
    """

    model: str
    gpu_total_bytes: int
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    num_beams: int
    attn_implementation: str
    cache_implementation: str | None
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    peak_bytes: int
    reserved_bytes: int
    cuda_context_bytes: int
    largest_batch_size: int
    uncertainty_bytes: int
    traced: bool
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the call's reserved memory and the CUDA context fit on the GPU."""
        return self.reserved_bytes + self.cuda_context_bytes <= self.gpu_total_bytes
