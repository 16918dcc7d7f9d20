"""Bytes that one row of ``transformers`` ``generate`` needs beyond the weights, in closed form.

For the prefill of a decoder with sdpa attention and the last position's logits only, the peak over the weights is
``KV(T) + 2*B*T*(3*I + 4*H)`` in bf16, within 0.21 % of a fake-tensor run in five cases; here with the model's own element size.
While decoding, ``torch.cat`` allocates a layer's keys or values anew at every step: half of a layer's cache on top. A padding
mask expands the KV heads of one layer to all heads (``repeat_kv``).
"""

from __future__ import annotations

from oomguard.errors import SettingError
from oomguard.memory.model.layer_caches import layer_caches
from oomguard.memory.model.shape import ModelShape


def generate_row_bytes(
    shape: ModelShape, prompt_tokens: int, max_new_tokens: int, *, padded: bool = False, eager: bool = False
) -> int:
    """Return the peak bytes of one row, at the prefill or at the last decoding step.

    Args:
        shape: the model's numbers.
        prompt_tokens: tokens of the prompt, padding included.
        max_new_tokens: tokens that the call may generate.
        padded: whether the row carries a mask of prompt by prompt.
        eager: whether attention keeps its scores: masked, copied to fp32 and through the softmax, 10 bytes each in bf16.

    Raises:
        SettingError: a layer keeps anything else than every token, or has experts in place of its MLP.
    """
    plain = all(cache.kind == "full" and not cache.latent for cache in layer_caches(shape, kv_element_bytes=2))
    intermediate = shape.number("intermediate_size") or 4 * shape.hidden
    if not plain or shape.number("num_experts") is not None:
        raise SettingError(
            "the closed form holds for plain decoders with the dynamic cache",
            hint="--trace runs the model's own code under fake tensors (torch and transformers installed)",
        )
    size = shape.dtype_bytes
    kv_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * size
    repeated = 2 * shape.heads * shape.head_dim * size
    # The MLP's peak and eager attention's do not come at the same time: the larger counts.
    mlp = prompt_tokens * size * (3 * intermediate + 4 * shape.hidden)
    scores = shape.heads * prompt_tokens * prompt_tokens * max(10, 3 * size) if eager else 0
    prefill = prompt_tokens * (kv_token + repeated) + max(mlp, scores)
    if padded:
        prefill += prompt_tokens * prompt_tokens
    total_tokens = prompt_tokens + max_new_tokens
    decode = total_tokens * (kv_token + kv_token // (2 * shape.layers) + repeated)
    logits = shape.vocab * (size + 4 * 3)  # the last position's logits, its fp32 copy and the processors' work on it
    return max(prefill, decode) + logits
