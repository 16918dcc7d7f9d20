"""KV cache bytes of plain decoders, by vLLM's own accounting (vllm/v1/kv_cache_interface.py, 0.33)."""

from __future__ import annotations

from typing import Final

from oomguard.memory.model_config import ModelConfig

# The largest default block: 128 tokens on the CPU backend (vllm/platforms/cpu.py, 0.32); CUDA's is 16. Taking the
# largest makes the need an upper bound by less than one block.
MAX_BLOCK_TOKENS: Final = 128


def kv_bytes_per_token(config: ModelConfig, tensor_parallel_size: int = 1) -> int:
    """Bytes of one token over all layers of one rank; KV heads are replicated where ranks outnumber them."""
    heads_per_rank = max(1, config.kv_heads // tensor_parallel_size)
    return 2 * config.layers * heads_per_rank * config.head_dim * config.dtype_bytes


def kv_request_bytes(bytes_per_token: int, tokens: int) -> int:
    """Bytes that one request of ``tokens`` tokens needs, whole blocks, and the null block that vLLM keeps for itself."""
    blocks = -(-tokens // MAX_BLOCK_TOKENS) + 1
    return blocks * MAX_BLOCK_TOKENS * bytes_per_token
