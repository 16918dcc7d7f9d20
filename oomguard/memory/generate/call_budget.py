"""Where the bytes of one GPU go in a call of transformers' ``generate``: by the closed form, or by running the model's own code."""

from __future__ import annotations

from typing import Final

from oomguard.errors import SettingError
from oomguard.memory.constants import constant, latest, reserved_ratio
from oomguard.memory.generate.caching_allocator import least_capacity
from oomguard.memory.generate.call import CallBudget, PlannedCall
from oomguard.memory.generate.closed_form import generate_row_bytes
from oomguard.memory.generate.trace import traced_steps
from oomguard.memory.model.layer_caches import layer_caches
from oomguard.memory.model.model import Model

# The closed form is within 0.21 % of a fake-tensor run on five plain decoders (closed_form.py); other shapes are less sure.
_CLOSED_FORM_UNCERTAINTY_RATIO: Final = 0.03
_ATTENTIONS: Final = ("sdpa", "eager")


def budget_call(model: Model, call: PlannedCall, gpu_total_bytes: int, *, trace: bool = False) -> CallBudget:
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
            hint=f"the closed form knows {', '.join(_ATTENTIONS)}; --trace runs the model's own code",
        )
    length = call.prompt_tokens + call.max_new_tokens
    notes = []
    if model.shape.max_positions is not None and length > model.shape.max_positions:
        notes.append(f"{length} tokens are more than the model's {model.shape.max_positions} positions")
    rows = call.batch_size * call.num_beams
    context = constant("context", latest())["bytes"]
    if trace:
        found = traced_steps(call)
        weights, peak, uncertainty = found.weights_bytes, found.peak_bytes(call.max_new_tokens), 0
        events = list(found.all_events(call.max_new_tokens))
        reserved, reserved_from = least_capacity(events, peak), _REPLAYED
        reserved_weights = weights
    else:
        weights = sum(parameter.bytes for parameter in model.parameters)
        peak = weights + rows * _row_bytes(model, call)
        uncertainty = round(_CLOSED_FORM_UNCERTAINTY_RATIO * (peak - weights))
        ratio = 1 + reserved_ratio()
        reserved, reserved_from, reserved_weights = round(peak * ratio), _RESERVED, round(weights * ratio)
    token = sum(cache.token_bytes for cache in layer_caches(model.shape, kv_element_bytes=model.shape.dtype_bytes))
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
        largest_batch_size=max(0, int(room * call.batch_size / max(1, reserved - reserved_weights))),
        uncertainty_bytes=uncertainty,
        traced=trace,
        assumptions=(*model.assumptions, *notes, reserved_from),
    )


_REPLAYED: Final = (
    "reserved by torch: the least that its caching allocator gets along with, the call's allocations replayed"
)
_RESERVED: Final = "reserved by torch: 5.2 % over what is allocated, the most of four replayed calls"


def _row_bytes(model: Model, call: PlannedCall) -> int:
    if call.cache_implementation is not None:
        raise SettingError(
            f"the closed form holds for the dynamic cache, not {call.cache_implementation!r}",
            hint="--trace runs the model's own code under fake tensors (torch and transformers installed)",
        )
    eager = call.attn_implementation == "eager"
    return generate_row_bytes(model.shape, call.prompt_tokens, call.max_new_tokens, eager=eager)
