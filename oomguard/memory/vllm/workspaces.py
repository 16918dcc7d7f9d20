"""The buffer that fused experts and sparse attention work in: one for both, as large as the larger asks for.

Sources: vllm/model_executor/layers/fused_moe and v1/worker/workspace.py (0.12 to 0.33); v1/attention/backends/mla and
model_executor/layers/sparse_attn_indexer.py (0.13 to 0.33).
"""

from __future__ import annotations

from typing import Final

from packaging.version import Version

from oomguard.memory.constants import constant, since
from oomguard.memory.model.shape import ModelShape, is_count

# Keys of a sparse attention's indexer are one byte an element, with a scale of four for each 128.
_SCALED_ELEMENTS: Final = 128
_SCALE_BYTES: Final = 4


def workspace_bytes(
    shape: ModelShape, version: Version, *, step_tokens: int, longest_tokens: int, expert_ranks: int
) -> int:
    """Return the bytes of the buffer on one rank.

    Args:
        shape: the model's numbers.
        version: vLLM's version.
        step_tokens: tokens of one step.
        longest_tokens: the longest request.
        expert_ranks: ranks that share each expert; 1 where each expert is whole.
    """
    return max(_experts(shape, version, step_tokens, expert_ranks), _indexer(shape, version, longest_tokens))


def _experts(shape: ModelShape, version: Version, step_tokens: int, ranks: int) -> int:
    """Return what the fused experts work in: a token's activations once for each expert it is sent to."""
    experts, chosen = shape.number("num_experts") or 0, shape.number("num_experts_per_tok") or 0
    if experts <= 1 or not chosen:
        return 0
    width = -(-(shape.number("moe_intermediate_size") or shape.number("intermediate_size") or 0) // ranks)
    second = max(width, shape.hidden) if since("modular_experts_since", version) else width
    return step_tokens * chosen * (max(2 * width, shape.hidden) + second) * shape.dtype_bytes


def has_indexer(shape: ModelShape) -> bool:
    """Whether attention is sparse: an indexer chooses the keys."""
    return bool(shape.number("index_head_dim") and shape.number("index_topk"))


def _indexer(shape: ModelShape, version: Version, longest_tokens: int) -> int:
    """Return what the indexer of a sparse attention gathers its keys in: those of so many longest requests."""
    dim = shape.number("index_head_dim") or 0
    if not has_indexer(shape):
        return 0
    rule = constant("indexer_requests", version)
    long = longest_tokens > rule.get("long_tokens", longest_tokens)
    requests = rule["requests_of_long"] if long else rule["requests"]
    return int(requests) * (longest_tokens // compressed(shape)) * (dim + _SCALE_BYTES * -(-dim // _SCALED_ELEMENTS))


def compressed(shape: ModelShape) -> int:
    """Return how many tokens one key of the indexer stands for, in models whose layers compress.

    Of the ratios only the least has an indexer; the layers of the others attend to all keys. Source:
    vllm/models/deepseek_v4/attention.py of 0.25.
    """
    ratios = shape.config.get("compress_ratios")
    found = [ratio for ratio in ratios if is_count(ratio) and ratio > 1] if isinstance(ratios, list) else []
    return min(found, default=1)
