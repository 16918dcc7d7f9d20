"""Estimate the GPU memory of a transformers ``generate`` call, in closed form or by a trace."""

from __future__ import annotations

import math
from typing import Final

from oomguard.core.errors import SettingError
from oomguard.estimate.call.allocator import least_capacity
from oomguard.estimate.call.trace import CallBudget, PlannedCall, traced_steps
from oomguard.estimate.constants import constant, latest, reserved_ratio
from oomguard.estimate.model.layer_caches import layer_caches
from oomguard.estimate.model.model import Model
from oomguard.estimate.model.shape import FAMILIES, ModelShape, encoder_decoder

# Bytes per row of ``generate`` beyond the weights, in closed form.
#
# For a decoder's prefill with sdpa attention and only the last position's logits, the peak over the
# weights is ``KV(T) + 2*B*T*(3*I + 4*H)`` in bf16. That was within 0.21 % of a fake-tensor run in
# five cases; here the model's own element size replaces bf16. While decoding, ``torch.cat``
# reallocates a layer's keys or values at every step, which adds half of a layer's cache. A padding
# mask expands the KV heads of one layer to all heads (``repeat_kv``).


def generate_row_bytes(
    shape: ModelShape,
    prompt_tokens: int,
    max_new_tokens: int,
    *,
    padded: bool = False,
    eager: bool = False,
) -> int:
    """Return the peak bytes per row, at the prefill or at the last decoding step.

    Args:
        shape: the model's numbers.
        prompt_tokens: tokens of the prompt, including padding.
        max_new_tokens: tokens that the call may generate.
        padded: whether the row has a prompt-by-prompt mask.
        eager: whether attention stores its scores. Mask, fp32 copy and softmax take 10 bytes per
            score in bf16.

    Raises:
        SettingError: a layer caches less than every token, or has experts instead of an MLP.
    """
    plain = all(
        cache.kind == "full" and not cache.latent
        for cache in layer_caches(shape, kv_element_bytes=2)
    )
    intermediate = shape.number("intermediate_size") or 4 * shape.hidden
    if not plain or shape.number("num_experts") is not None:
        raise SettingError(
            "the closed form supports only plain decoders with the dynamic cache",
            hint=(
                "use --trace, which runs the model's own code under fake tensors (needs "
                "torch and transformers)"
            ),
        )
    size = shape.dtype_bytes
    kv_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * size
    repeated = repeated_bytes(shape, padded=padded, eager=eager)
    # The MLP and eager attention peak at different times, so the larger one counts.
    mlp = prompt_tokens * size * (3 * intermediate + 4 * shape.hidden)
    if eager:
        each = max(10, 3 * size)
        if shape.model_type in FAMILIES["types"]["alibi"]:
            each += size  # the bias is added to a copy of the scores
        scores = shape.heads * prompt_tokens * prompt_tokens * each
    else:
        scores = 0
    prefill = prompt_tokens * (kv_token + repeated) + max(mlp, scores)
    if padded:
        prefill += prompt_tokens * prompt_tokens
    total_tokens = prompt_tokens + max_new_tokens
    decode = total_tokens * (kv_token + kv_token // (2 * shape.layers) + repeated)
    return max(prefill, decode) + logits_bytes(shape)


def repeated_bytes(shape: ModelShape, *, padded: bool, eager: bool) -> int:
    """Return the bytes of one token's keys and values once they are repeated for all heads.

    sdpa without a mask reads the shared heads as they are (use_gqa_in_sdpa, transformers 5.23),
    and heads that are not shared are never repeated.
    """
    if shape.kv_heads >= shape.heads or not (padded or eager):
        return 0
    return 2 * shape.heads * shape.head_dim * shape.dtype_bytes


def logits_bytes(shape: ModelShape) -> int:
    """Return the last position's logits, their fp32 copy, and the processors' tensors of a row."""
    return shape.vocab * (shape.dtype_bytes + 4 * 3)


# How far the closed form may be off, as shares of what it counts beyond the weights: measured
# against traces of twelve small decoders. Older versions repeat keys and values also without a
# mask. The logits come after the layers, so a call whose peak is in a layer has none of them there.
_UNCERTAIN_RATIO: Final = 0.08
_UNCERTAIN_LOGITS_RATIO: Final = 1.0
_ATTENTIONS: Final = ("sdpa", "eager")


def budget_call(
    model: Model, call: PlannedCall, gpu_total_bytes: int, *, trace: bool = False
) -> CallBudget:
    """Estimate the memory of one ``generate`` call.

    Args:
        model: the model.
        call: the call's numbers.
        gpu_total_bytes: the memory of the GPU.
        trace: whether to run the model's own code under fake tensors instead of the closed form.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        InputError: ``trace`` cannot run the model.
        SettingError: a number of the call is invalid, or the closed form does not apply.
    """
    if gpu_total_bytes <= 0:
        raise SettingError("a GPU needs more than 0 bytes", hint="--gpu-memory 24GiB")
    if call.attn_implementation not in _ATTENTIONS and not trace:
        raise SettingError(
            f"attn_implementation {call.attn_implementation!r} is not supported",
            hint=(
                f"the closed form supports {', '.join(_ATTENTIONS)}; --trace runs the "
                "model's own code"
            ),
        )
    if encoder_decoder(model.shape.outer) or model.shape.outer.get("is_encoder_decoder"):
        raise SettingError(
            "the estimate of a call supports decoders only, but this model has an encoder too",
            hint="measure one call: oomguard.watch()",
        )
    length = call.prompt_tokens + call.max_new_tokens
    notes = []
    if model.shape.max_positions is not None and length > model.shape.max_positions:
        notes.append(f"{length} tokens exceed the model's {model.shape.max_positions} positions")
    rows = call.batch_size * call.num_beams
    context = constant("context", latest())["bytes"]
    if trace:
        found = traced_steps(call)
        weights = found.weights_bytes
        peak = found.peak_bytes(call.max_new_tokens)
        uncertainty = 0
        events = list(found.all_events(call.max_new_tokens))
        reserved = least_capacity(events, peak)
        reserved_from = _REPLAYED
        reserved_weights = weights
    else:
        weights = sum(parameter.bytes for parameter in model.parameters)
        peak = weights + rows * _row_bytes(model, call)
        uncertainty = _uncertainty(model, call, peak - weights)
        ratio = 1 + reserved_ratio()
        reserved = round(peak * ratio)
        reserved_from = _RESERVED
        reserved_weights = round(weights * ratio)
    token = sum(
        cache.token_bytes
        for cache in layer_caches(model.shape, kv_element_bytes=model.shape.dtype_bytes)
    )
    room = gpu_total_bytes - context - reserved_weights
    return CallBudget(
        model=model.name,
        gpu_total_bytes=gpu_total_bytes,
        batch_size=call.batch_size,
        prompt_tokens=call.prompt_tokens,
        max_new_tokens=call.max_new_tokens,
        num_beams=call.num_beams,
        attn_implementation=call.attn_implementation,
        cache_implementation=call.cache_implementation,
        weights_bytes=weights,
        kv_bytes_per_token=token,
        kv_cache_bytes=rows * length * token,
        peak_bytes=peak,
        reserved_bytes=reserved,
        cuda_context_bytes=context,
        largest_batch_size=max(
            0, int(room * call.batch_size / max(1, reserved - reserved_weights + uncertainty))
        ),
        uncertainty_bytes=uncertainty,
        traced=trace,
        unread=() if trace else model.unread,
        assumptions=(*model.assumptions, *notes, reserved_from),
    )


def _uncertainty(model: Model, call: PlannedCall, beyond_bytes: int) -> int:
    """Return by how much the closed form may be off in bytes, in both directions."""
    shape = model.shape
    rows = call.batch_size * call.num_beams
    eager = call.attn_implementation == "eager"
    repeated = repeated_bytes(shape, padded=True, eager=True)
    repeated -= repeated_bytes(shape, padded=False, eager=eager)
    tokens = call.prompt_tokens + call.max_new_tokens
    sources = (
        _UNCERTAIN_RATIO * beyond_bytes,
        _UNCERTAIN_LOGITS_RATIO * rows * logits_bytes(shape),
        rows * tokens * repeated,
        model.weights_uncertainty_ratio * sum(p.bytes for p in model.parameters),
    )
    return round(math.hypot(*sources))


_REPLAYED: Final = (
    "reserved by torch: the least that its caching allocator needs, from a replay of the "
    "call's allocations"
)
_RESERVED: Final = (
    "reserved by torch: 5.2 % over the allocated bytes, the largest share in four replayed calls"
)


def _row_bytes(model: Model, call: PlannedCall) -> int:
    if call.cache_implementation is not None:
        raise SettingError(
            f"the closed form supports only the dynamic cache, not {call.cache_implementation!r}",
            hint=(
                "use --trace, which runs the model's own code under fake tensors (needs "
                "torch and transformers)"
            ),
        )
    eager = call.attn_implementation == "eager"
    return generate_row_bytes(model.shape, call.prompt_tokens, call.max_new_tokens, eager=eager)
