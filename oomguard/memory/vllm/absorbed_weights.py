"""What the engine makes of latent attention's weights once they are loaded: products of two matrices, or one of them unpacked.

Source: process_weights_after_loading in vllm/attention/backends/mla/utils.py, 0.7.3 (0.7.1 to 0.7; later versions multiply as they go,
and keep the key-value projection of an FP8 checkpoint in half precision beside it).
Of a query of A inputs, N heads on a rank, latent vectors of C, rotary dimensions R and H outputs a layer keeps ``A * N * C`` and
``N * C * H`` elements, of one byte where the checkpoint is in FP8; ``A * N * R``, and of a quantised checkpoint the whole
key-value projection, in half precision.
"""

from __future__ import annotations

from packaging.version import Version

from oomguard.memory.constants import rows_of
from oomguard.memory.model.layer_caches import keeps_latent
from oomguard.memory.model.quantized import quantization_config
from oomguard.memory.model.shape import ModelShape


def absorbed_bytes(shape: ModelShape, version: Version, *, ranks: int, layers: int) -> int:
    """Return the bytes of so many layers on one rank; 0 for other models and versions.

    Args:
        shape: the model's numbers.
        version: vLLM's version.
        ranks: ranks that share each layer's heads.
        layers: layers on the rank.
    """
    latent = shape.number("kv_lora_rank")
    rule = next(iter(rows_of("absorbed_weights", version)), None)
    if not latent or not keeps_latent(shape) or rule is None:
        return 0
    config = quantization_config(shape)
    is_fp8 = config is not None and config.get("quant_method") == "fp8"
    heads, query = -(-shape.heads // ranks), shape.number("q_lora_rank") or shape.hidden
    rotary, plain, value = (shape.number(name) or 0 for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    unpacked = heads * latent * (plain + value) * shape.dtype_bytes
    if not rule["products"]:
        return layers * unpacked if is_fp8 else 0
    element = 1 if is_fp8 else shape.dtype_bytes
    products = heads * latent * (query + shape.hidden) * element
    copies = heads * query * rotary * shape.dtype_bytes + (unpacked if config is not None else 0)
    return layers * (products + copies)
