"""Where the bytes of one GPU go in a call of transformers' ``generate``: by the closed form, or by
running the model's own code.
"""

from __future__ import annotations

from typing import Final

from oomguard.core.errors import SettingError
from oomguard.estimate.call.allocator import least_capacity
from oomguard.estimate.call.trace import CallBudget, PlannedCall, traced_steps
from oomguard.estimate.constants import constant, latest, reserved_ratio
from oomguard.estimate.model.layer_caches import layer_caches
from oomguard.estimate.model.model import Model
from oomguard.estimate.model.shape import ModelShape

# Bytes that one row of ``transformers`` ``generate`` needs beyond the weights, in closed form.
#
# For the prefill of a decoder with sdpa attention and the last position's logits only, the peak
# over the weights is ``KV(T) + 2*B*T*(3*I + 4*H)`` in bf16, within 0.21 % of a fake-tensor run in
# five cases; here with the model's own element size. While decoding, ``torch.cat`` allocates a
# layer's keys or values anew at every step: half of a layer's cache on top. A padding mask expands
# the KV heads of one layer to all heads (``repeat_kv``).


def generate_row_bytes(
    shape: ModelShape,
    prompt_tokens: int,
    max_new_tokens: int,
    *,
    padded: bool = False,
    eager: bool = False,
) -> int:
    """Return the peak bytes of one row, at the prefill or at the last decoding step.

    Args:
        shape: the model's numbers.
        prompt_tokens: tokens of the prompt, padding included.
        max_new_tokens: tokens that the call may generate.
        padded: whether the row carries a mask of prompt by prompt.
        eager: whether attention keeps its scores: masked, copied to fp32 and through the softmax,
            10 bytes each in bf16.

    Raises:
        SettingError: a layer keeps anything else than every token, or has experts in place of its
            MLP.
    """
    plain = all(
        cache.kind == "full" and not cache.latent
        for cache in layer_caches(shape, kv_element_bytes=2)
    )
    intermediate = shape.number("intermediate_size") or 4 * shape.hidden
    if not plain or shape.number("num_experts") is not None:
        raise SettingError(
            "the closed form holds for plain decoders with the dynamic cache",
            hint=(
                "--trace runs the model's own code under fake tensors (torch and transformers "
                "installed)"
            ),
        )
    size = shape.dtype_bytes
    kv_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * size
    repeated = 2 * shape.heads * shape.head_dim * size
    # The MLP's peak and eager attention's do not come at the same time: the larger counts.
    mlp = prompt_tokens * size * (3 * intermediate + 4 * shape.hidden)
    if eager:
        scores = shape.heads * prompt_tokens * prompt_tokens * max(10, 3 * size)
    else:
        scores = 0
    prefill = prompt_tokens * (kv_token + repeated) + max(mlp, scores)
    if padded:
        prefill += prompt_tokens * prompt_tokens
    total_tokens = prompt_tokens + max_new_tokens
    decode = total_tokens * (kv_token + kv_token // (2 * shape.layers) + repeated)
    logits = shape.vocab * (
        size + 4 * 3
    )  # the last position's logits, its fp32 copy and the processors' work on it
    return max(prefill, decode) + logits


# The closed form is within 0.21 % of a fake-tensor run on five plain decoders (closed_form.py);
# other shapes are less sure.
_CLOSED_FORM_UNCERTAINTY_RATIO: Final = 0.03
_ATTENTIONS: Final = ("sdpa", "eager")


def budget_call(
    model: Model, call: PlannedCall, gpu_total_bytes: int, *, trace: bool = False
) -> CallBudget:
    """Budget one call of ``generate``.

    Args:
        model: the model.
        call: the call's numbers.
        gpu_total_bytes: the memory of the GPU.
        trace: whether to run the model's own code under fake tensors in place of the closed form.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        InputError: ``trace`` cannot run the model.
        SettingError: a number of the call cannot be had, or the closed form does not hold for it.
    """
    if gpu_total_bytes <= 0:
        raise SettingError("a GPU of 0 bytes holds nothing", hint="--gpu-memory 24GiB")
    if call.attn_implementation not in _ATTENTIONS and not trace:
        raise SettingError(
            f"attn_implementation is {call.attn_implementation!r}",
            hint=(
                f"the closed form knows {', '.join(_ATTENTIONS)}; --trace runs the model's own code"
            ),
        )
    length = call.prompt_tokens + call.max_new_tokens
    notes = []
    if model.shape.max_positions is not None and length > model.shape.max_positions:
        notes.append(
            f"{length} tokens are more than the model's {model.shape.max_positions} positions"
        )
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
        uncertainty = round(_CLOSED_FORM_UNCERTAINTY_RATIO * (peak - weights))
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
            0, int(room * call.batch_size / max(1, reserved - reserved_weights))
        ),
        uncertainty_bytes=uncertainty,
        traced=trace,
        assumptions=(*model.assumptions, *notes, reserved_from),
    )


_REPLAYED: Final = (
    "reserved by torch: the least that its caching allocator gets along with, the call's "
    "allocations replayed"
)
_RESERVED: Final = (
    "reserved by torch: 5.2 % over what is allocated, the most of four replayed calls"
)


def _row_bytes(model: Model, call: PlannedCall) -> int:
    if call.cache_implementation is not None:
        raise SettingError(
            f"the closed form holds for the dynamic cache, not {call.cache_implementation!r}",
            hint=(
                "--trace runs the model's own code under fake tensors (torch and transformers "
                "installed)"
            ),
        )
    eager = call.attn_implementation == "eager"
    return generate_row_bytes(model.shape, call.prompt_tokens, call.max_new_tokens, eager=eager)
