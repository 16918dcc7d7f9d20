"""Where the bytes of one GPU go in a call of transformers' ``generate``: by the closed form, or by running the model's own code."""

from __future__ import annotations

from typing import Final

from oomguard.errors import SettingError
from oomguard.memory.caching_allocator import least_capacity
from oomguard.memory.constants import constant, latest, reserved_ratio
from oomguard.memory.generate import generate_row_bytes
from oomguard.memory.layer_caches import layer_caches
from oomguard.memory.prepared import Prepared
from oomguard.memory.trace import GenerateCall, traced_steps
from oomguard.memory_plan import GeneratePlan

# The closed form is within 0.21 % of a fake-tensor run on five plain decoders (generate.py); other shapes are less sure.
_CLOSED_FORM_UNCERTAINTY_RATIO: Final = 0.03
_ATTENTIONS: Final = ("sdpa", "eager")


def plan_generate(model: Prepared, call: GenerateCall, gpu_total_bytes: int, *, trace: bool = False) -> GeneratePlan:
    """The budget of one call; raises SettingError for its numbers, InputError where ``trace`` cannot run the model."""
    if gpu_total_bytes <= 0:
        raise SettingError("a GPU of 0 bytes holds nothing", hint="--gpu-memory 24GiB")
    if call.attn_implementation not in _ATTENTIONS and not trace:
        raise SettingError(
            f"attn_implementation is {call.attn_implementation!r}",
            hint=f"the closed form knows {', '.join(_ATTENTIONS)}; --trace runs the model's own code",
        )
    length = call.prompt_tokens + call.max_new_tokens
    if model.shape.max_positions is not None and length > model.shape.max_positions:
        note = f"{length} tokens are more than the model's {model.shape.max_positions} positions"
    else:
        note = ""
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
    return GeneratePlan(
        model=model.name, gpu_total_bytes=gpu_total_bytes, batch_size=call.batch_size, prompt_tokens=call.prompt_tokens,
        max_new_tokens=call.max_new_tokens, num_beams=call.num_beams, attn_implementation=call.attn_implementation,
        cache_implementation=call.cache_implementation, weights_bytes=weights, kv_bytes_per_token=token,
        kv_cache_bytes=rows * length * token, peak_bytes=peak, reserved_bytes=reserved, context_bytes=context,
        largest_batch_size=max(0, int(room * call.batch_size / max(1, reserved - reserved_weights))), uncertainty_bytes=uncertainty,
        traced=trace, assumptions=(*model.assumptions, *((note,) if note else ()), reserved_from),
    )  # fmt: skip


_REPLAYED: Final = (
    "reserved by torch: the least that its caching allocator gets along with, the call's allocations replayed"
)
_RESERVED: Final = "reserved by torch: 5.2 % over what is allocated, the most of four replayed calls"


def _row_bytes(model: Prepared, call: GenerateCall) -> int:
    if call.cache_implementation is not None:
        raise SettingError(
            f"the closed form holds for the dynamic cache, not {call.cache_implementation!r}",
            hint="--trace runs the model's own code under fake tensors (torch and transformers installed)",
        )
    eager = call.attn_implementation == "eager"
    return generate_row_bytes(model.shape, call.prompt_tokens, call.max_new_tokens, eager=eager)
