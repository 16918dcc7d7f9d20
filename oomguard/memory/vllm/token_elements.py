"""What one token takes in a layer beside its hidden states and its MLP: attention's tensors, and the inputs of experts in eight bits."""

from __future__ import annotations

from oomguard.memory.model.layer_kinds import layer_kinds
from oomguard.memory.model.quantized import quantization_config
from oomguard.memory.model.shape import ModelShape

_DELTA = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")


def mixer_elements(shape: ModelShape, ranks: int) -> int:
    """Return the elements of the largest attention on one rank; latent attention has a rule of its own (activations.py).

    Attention has queries, keys, values and its output. A gated delta rule has both of its projections' keys and values, its output
    and that output's norm; its kernels do not run while a start is profiled. Source: forward of GatedDeltaNetAttention in
    vllm/model_executor/layers/mamba/gdn_linear_attn.py, 0.20.

    Args:
        shape: the model's numbers.
        ranks: ranks that share its heads.
    """
    kinds = set(layer_kinds(shape))
    attention = 0 if shape.number("kv_lora_rank") else 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    delta = 0
    if "delta" in kinds:
        key_heads, key, value_heads, value = (shape.number(name) or 0 for name in _DELTA)
        delta = 2 * key_heads * key + 4 * value_heads * value
    return -(-max(attention, delta) // ranks)


def fp8_inputs(shape: ModelShape, ranks: int) -> int:
    """Return the bytes of one token that FP8 experts take as copies of their inputs: the layer's, and of each expert the product.

    Source: fused_experts_impl in vllm/model_executor/layers/fused_moe/fused_moe.py, 0.6 to 0.20. A start of 0.20 printed 163 kB for
    each further token of a step, with them 163.

    Args:
        shape: the model's numbers.
        ranks: ranks that share each expert.
    """
    config = quantization_config(shape) or {}
    chosen = shape.number("num_experts_per_tok") or 0
    if config.get("quant_method") != "fp8" or (shape.number("num_experts") or 0) <= 1:
        return 0
    width = shape.number("moe_intermediate_size") or shape.number("intermediate_size") or 0
    return shape.hidden + chosen * -(-width // ranks)
