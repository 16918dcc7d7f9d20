"""Tensors that a step of CUDA graphs works in and that a formula gives: they stay in the graphs' pool, and once more in torch's own.

A size is run once before it is captured. What that run takes, torch's allocator keeps, so a tensor of the captured step is there twice.
"""

from __future__ import annotations

from typing import Final

from oomguard.memory.constants import constant
from oomguard.memory.model.families import FAMILIES
from oomguard.memory.model.quantized import is_nvfp4, quantization_config
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.first_engine import is_first_engine
from oomguard.memory.vllm.known_gpu import architecture_of, has_nvlink
from oomguard.memory.vllm.start import VllmSettings
from oomguard.memory.vllm.workspaces import compressed, has_indexer

_LOGIT_BYTES: Final = 4
_GATE_AND_UP: Final = 2
# vLLM's own kernels for NVFP4 experts have room for the scales of so many tokens of each chosen expert, one byte for 16 elements:
# VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE in vllm/envs.py, scaled_fp4_experts_quant in vllm/_custom_ops.py, 0.11 to 0.27.
_FP4_TOKENS: Final = 163_840
_FP4_ELEMENTS_A_WORD: Final = 64
_WORD_BYTES: Final = 4


def graph_buffers_bytes(settings: VllmSettings, shape: ModelShape, decode_tokens: int) -> int:
    """Return what the indexer's logits and dequantised weights take while graphs are captured.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
        decode_tokens: tokens of the largest captured step that only decodes.
    """
    return _indexer_logits(settings, shape, decode_tokens) + _dequantized(settings, shape)


def _indexer_logits(settings: VllmSettings, shape: ModelShape, decode_tokens: int) -> int:
    """Return the logits of a sparse attention's indexer, one for each key of the longest request (fp8_paged_mqa_logits).

    A step that does not only decode has the same dummy of them that is there while a start is profiled
    (vllm/model_executor/layers/sparse_attn_indexer.py, 0.20 to 0.27).
    """
    if not has_indexer(shape):
        return 0
    logits = decode_tokens * ((settings.max_model_len or 0) // compressed(shape)) * _LOGIT_BYTES
    return logits + max(logits, int(constant("indexer_logits", settings.version)["bytes"]))


def _dequantized(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the largest projection of bitsandbytes' weights in half precision: the MLP's first (bitsandbytes.matmul_4bit).

    The second engine's own pool has had room for it in the starts that were measured.
    """
    method = settings.quantization or (quantization_config(shape) or {}).get("quant_method")
    if method != "bitsandbytes":
        return 0
    width = (shape.number("intermediate_size") or 0) // settings.tensor_parallel_size
    copies = 2 if is_first_engine(settings) else 1
    return copies * _GATE_AND_UP * width * shape.hidden * shape.dtype_bytes


def fp4_scales_bytes(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the scales of both inputs of NVFP4 experts with a gate on GPUs that vLLM's own kernels run on: Blackwell without links.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    chosen = shape.number("num_experts_per_tok") or 0
    gated = shape.model_type not in FAMILIES["types"]["ungated_experts"]
    own = gated and architecture_of(settings) in (None, "blackwell") and not has_nvlink(settings)
    if (shape.number("num_experts") or 0) <= 1 or not own or not is_nvfp4(shape):
        return 0
    width = (shape.number("moe_intermediate_size") or 0) // settings.tensor_parallel_size
    words = -(-shape.hidden // _FP4_ELEMENTS_A_WORD) + -(-width // _FP4_ELEMENTS_A_WORD)
    return _FP4_TOKENS * chosen * words * _WORD_BYTES
