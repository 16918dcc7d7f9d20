"""Estimate the GPU memory of a transformers ``generate`` call, in closed form or by a trace.

The trace needs no GPU and no weights, and takes seconds for a model of eight billion parameters. It
happens in a child process because fake tensors of a CUDA build would create a context on the
device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.files import read_tables
from oomguard.core.installation import install_hint
from oomguard.core.records import ShownRecord
from oomguard.estimate import Fit, answer
from oomguard.estimate.call.allocator import least_capacity
from oomguard.estimate.child_python import call_child
from oomguard.estimate.constants import constant, latest, reserved_ratio
from oomguard.estimate.model.layer_caches import LayerCache, layer_caches
from oomguard.estimate.model.model import Model
from oomguard.estimate.model.parameters import has_gate
from oomguard.estimate.model.shape import FAMILIES, ModelShape, encoder_decoder

# The input and the result of an estimate for one ``generate`` call.


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """Hold the numbers of one ``generate`` call.

    ``config`` is the model's configuration; ``dtype`` is torch's name for the weights' data type.
    """

    config: Mapping[str, Any]
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    num_beams: int = 1
    attn_implementation: str = "sdpa"
    cache_implementation: str | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, repr=False)
class CallBudget(ShownRecord):
    """Report the bytes of one transformers ``generate`` call on one GPU.

    Attributes:
        weights_bytes: the weights.
        kv_bytes_per_token: one token of one row in all layers.
        kv_cache_bytes: the cache at the end of the call.
        peak_bytes: the largest allocation at once, including weights.
        reserved_bytes: memory that torch's caching allocator reserves at the peak.
        cuda_context_bytes: the CUDA context.
        largest_batch_size: the number of rows that would fit, 0 if none does.
        uncertainty_bytes: the uncertainty of the peak in both directions.
        traced: whether the estimate ran the model's own code under fake tensors.
        assumptions: one line for each value that was neither given nor read.
        unread: keys of the configuration that may shape the cache or the weights but were not read.
    """

    model: str
    gpu_total_bytes: int
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    num_beams: int
    attn_implementation: str
    cache_implementation: str | None
    weights_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    peak_bytes: int
    reserved_bytes: int
    cuda_context_bytes: int
    largest_batch_size: int
    uncertainty_bytes: int
    traced: bool
    assumptions: tuple[str, ...]
    unread: tuple[str, ...] = ()

    @property
    def fit(self) -> Fit:
        """Return whether the call fits on the GPU: ``yes``, ``no``, or ``unsure``."""
        return answer(self.spare_bytes, self.uncertainty_bytes, unread=bool(self.unread))

    @property
    def fits(self) -> bool:
        """Return whether the reserved memory and the CUDA context surely fit on the GPU."""
        return self.fit == "yes"

    @property
    def spare_bytes(self) -> int:
        """Return the GPU's bytes beyond the reserved memory and the CUDA context."""
        return self.gpu_total_bytes - self.reserved_bytes - self.cuda_context_bytes


# The live bytes of a call's first steps, and the extrapolation to the rest.

# Traced steps before the extrapolation: the first is the prefill, and the second may still warm up.
STEPS: Final = 5
# In repeating steps a storage lives at most this many steps: the next step uses a result, and its
# views live one step longer.
_OLDEST: Final = 2
# Steps that the allocator's replay repeats at most. Its waste is visible long before, and replays
# must be fast.
_MOST_REPEATS: Final = 256
_LEAST_REPEATS: Final = 16
_MOST_EVENTS: Final = 40_000


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """Hold the memory of a call's first steps, in bytes.

    Attributes:
        weights_bytes: the weights.
        start_bytes: everything alive at the start of the call, including weights.
        peaks_bytes: the peak of each step, including that.
        events: allocations and frees in order if requested: (storage number, bytes, or 0 for a
            free).
        events_seen: the number of events up to the end of each step.
        end_bytes: the peak of the call's last step if it was traced separately; None otherwise.
    """

    weights_bytes: int
    start_bytes: int
    peaks_bytes: tuple[int, ...]
    events: tuple[tuple[int, int], ...] = ()
    events_seen: tuple[int, ...] = ()
    end_bytes: int | None = None

    def last_step_bytes(self, steps: int) -> int:
        """Return the largest peak of the steps after the first, or 0 with only one step.

        Later steps end at ``end_bytes`` if it is known. Otherwise each adds as many bytes as the
        last traced one.
        """
        peaks = self.peaks_bytes
        if len(peaks) < 2:
            return 0
        left = steps - len(peaks)
        if left > 0 and self.end_bytes is not None:
            return max(self.end_bytes, *peaks[1:])
        last = peaks[-1] + (left * (peaks[-1] - peaks[-2]) if len(peaks) > 2 and left > 0 else 0)
        return max(last, *peaks[1:])

    def peak_bytes(self, steps: int) -> int:
        """Return the most bytes alive at once in a call of ``steps`` steps."""
        return max(self.peaks_bytes[0], self.last_step_bytes(steps))

    def all_events(self, steps: int) -> Iterator[tuple[int, int]]:
        """Yield the allocations and frees of ``steps`` steps by repeating the last traced one.

        Every size grows as between the last two traced steps. In a very long call one step
        represents several. If the last two steps differ, only the traced ones follow.
        """
        yield from self.events
        left = steps - len(self.events_seen)
        if left > 0:
            pattern = self._pattern()
        else:
            pattern = None
        if pattern is None:
            return
        born: dict[tuple[int, int], int] = {}
        for before in range(_OLDEST):
            first = self.events_seen[-2 - before]
            for at, entry in enumerate(pattern):
                if entry.bytes:
                    born[-before, at] = self.events[first + at][0]
        fresh = max(number for number, _ in self.events)
        repeats = min(
            left, _MOST_REPEATS, max(_LEAST_REPEATS, _MOST_EVENTS // max(1, len(pattern)))
        )
        for step in range(1, repeats + 1):
            for at, entry in enumerate(pattern):
                if entry.bytes:
                    fresh += 1
                    born[step, at] = fresh
                    yield fresh, entry.bytes + step * left // repeats * entry.rise_bytes
                else:
                    yield born.pop((step - entry.age, entry.place)), 0

    def _pattern(self) -> list[_Repeated] | None:
        """Return the events of the last step, or None if an earlier step did something else."""
        if len(self.events_seen) < 2 + _OLDEST:
            return None
        ends = self.events_seen[-2 - _OLDEST :]
        *others, before, last = (self.events[start:end] for start, end in pairwise(ends))
        if any(len(step) != len(last) for step in (*others, before)):
            return None
        older = {number for number, _ in self.events[: ends[0]]}
        # The age in steps and the position of each storage from the earlier steps.
        earlier: dict[int, tuple[int, int]] = {}
        for age, step in enumerate((before, *reversed(others)), 1):
            for at, (number, size) in enumerate(step):
                if size:
                    earlier[number] = (age, at)
        newer: dict[int, int] = {}
        pattern = []
        for at, ((_, size_before), (number, size)) in enumerate(zip(before, last, strict=True)):
            if bool(size_before) != bool(size):
                return None
            if size:
                if number in older or number in earlier or number in newer:
                    return None  # one that grew in place
                newer[number] = at
                pattern.append(_Repeated(size, size - size_before, 0, at))
            elif number in newer:
                pattern.append(_Repeated(0, 0, 0, newer[number]))
            elif number in earlier:
                pattern.append(_Repeated(0, 0, *earlier[number]))
            else:
                return None
        return pattern


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Describe one repeating event: a new storage, ``rise_bytes`` larger than a step before.

    With 0 bytes it is the free of the storage that was new ``age`` steps ago at ``place``.
    """

    bytes: int
    rise_bytes: int
    age: int
    place: int


_LIMIT_S: Final = 600
_ENVIRONMENT: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


def traced_steps(call: PlannedCall) -> TracedSteps:
    """Run a call's first steps under fake tensors.

    Raises:
        InputError: torch or transformers is missing, or cannot run the model.
        SettingError: a number of the call is not above zero.
    """
    for name in ("batch_size", "prompt_tokens", "max_new_tokens", "num_beams"):
        if getattr(call, name) <= 0:
            raise SettingError(f"{name} is {getattr(call, name)}")
    question = {
        **{name: getattr(call, name) for name in call.__slots__},
        "config": dict(call.config),
    }
    answer = call_child(
        "oomguard.estimate.call.fake_generate",
        question,
        limit_s=_LIMIT_S,
        environment=_ENVIRONMENT,
        failed="the trace of the model failed",
        late="the trace took more than {} seconds",
        hint=f"if torch or transformers is missing: {install_hint('hf')}",
        late_hint="use fewer prompt tokens or beams",
    )
    return TracedSteps(
        weights_bytes=answer["weights_bytes"],
        start_bytes=answer["start_bytes"],
        peaks_bytes=tuple(answer["peaks_bytes"]),
        events=tuple((number, size) for number, size in answer["events"]),
        events_seen=tuple(answer["events_seen"]),
        end_bytes=answer["end_bytes"],
    )


# Bytes per row of ``generate`` beyond the weights, in closed form.
#
# Memory peaks at one of a few moments: while the MLP or the attention of the last layer runs in
# the prefill, when the prompt's logits are copied to float32, or in the last decoding step. At each
# moment the form adds up the tensors that are alive, by their names in transformers' modeling
# files. live_tensors.toml lists those that differ between families.

_TENSORS_FILE: Final = Path(__file__).with_name("live_tensors.toml")
_FLOAT32_BYTES: Final = 4
_FLOAT32_COPY: Final = "float32 copy"
# input_ids, attention_mask, position_ids, and the mask's running sum, all int64.
_ID_BYTES: Final = 4 * 8


@functools.cache
def live_tensors(model_type: str) -> Mapping[str, Any]:
    """Return the names of the tensors that are alive at each moment, and their data types.

    Raises:
        SettingError: the closed form does not cover this type.
    """
    tables = read_tables("live-tensors", [_TENSORS_FILE])[_TENSORS_FILE]
    if model_type in tables["uncovered"]["types"]:
        raise SettingError(f"the closed form does not cover {model_type}", hint=_TRACE_HINT)
    found = {**tables["decoder"], "activations": tables["activations"]}
    for family in tables["family"]:
        if model_type in family["types"]:
            found |= family
    return found


def generate_row_bytes(
    shape: ModelShape,
    prompt_tokens: int,
    max_new_tokens: int,
    *,
    padded: bool = False,
    eager: bool = False,
    beams: bool = False,
) -> int:
    """Return the peak bytes per row, at the prefill or at the last decoding step.

    Args:
        shape: the model's numbers.
        prompt_tokens: tokens of the prompt, including padding.
        max_new_tokens: tokens that the call may generate.
        padded: whether the row has a prompt-by-prompt mask.
        eager: whether attention stores its scores.
        beams: whether the row is one of several beams, which score every token of the vocabulary.

    Raises:
        SettingError: a layer caches something other than keys and values.
    """
    caches = layer_caches(shape, kv_element_bytes=shape.dtype_bytes)
    for cache in caches:
        if cache.latent or cache.kind not in {"full", "sliding"}:
            raise SettingError(
                "the closed form supports only decoders that cache keys and values",
                hint=_TRACE_HINT,
            )
    prefill = prompt_tokens * (sum(cache.token_bytes for cache in caches) + _ID_BYTES)
    prefill += max(
        _mlp_bytes(shape, prompt_tokens, padded=padded, eager=eager),
        _attention_bytes(shape, prompt_tokens, padded=padded, eager=eager),
        _first_logits_bytes(shape, prompt_tokens, beams=beams),
    )
    if max_new_tokens == 1:
        return prefill
    # The last token is never fed back, so the cache has one token fewer than the answer.
    total_tokens = prompt_tokens + max_new_tokens - 1
    return max(prefill, _decode_bytes(shape, caches, total_tokens, eager=eager, beams=beams))


def _mlp_bytes(shape: ModelShape, tokens: int, *, padded: bool, eager: bool) -> int:
    """Return the bytes while an MLP or the experts run, without the cache."""
    live = live_tensors(shape.model_type)
    size = shape.dtype_bytes
    intermediate = shape.number("intermediate_size") or 4 * shape.hidden
    experts = shape.number("num_experts") or 0
    if experts > 1:
        mlp = _experts_bytes(shape, intermediate)
    else:
        mlp = _mlp_tensors(shape, live) * intermediate * size
    # The weights of RMSNorm's float32 copy and its product, where an MLP is narrow.
    norm = 2 * _FLOAT32_BYTES * shape.hidden
    width = len(live["layer"]) * shape.hidden * size + max(mlp, norm)
    bytes_ = tokens * (width + _rotary_bytes(shape, live)) + _mask_bytes(
        shape, tokens, padded=padded, eager=eager
    )
    if eager:
        # The layer still refers to the attention's weights, which eager attention returns.
        bytes_ += shape.heads * tokens * tokens * size
    return bytes_


def _mlp_tensors(shape: ModelShape, live: Mapping[str, Any]) -> int:
    """Count the tensors as wide as the MLP that are alive while it multiplies."""
    if "mlp" in live:
        return len(live["mlp"])
    if has_gate(shape):
        return len(live["gated_mlp"])
    named = shape.config.get("hidden_act", shape.config.get("activation_function"))
    activation = named or live.get("activation")
    return len(live["activations"].get(activation, live["plain_mlp"]))


def _experts_bytes(shape: ModelShape, intermediate: int) -> int:
    """Return the bytes of one token's copies for its experts (transformers' grouped product).

    First the selected states, gate and up, the activation and the product; then the states, the
    result, the weighted result, and the same in the tokens' order.
    """
    size = shape.dtype_bytes
    width = shape.number("moe_intermediate_size") or intermediate
    if live_tensors(shape.model_type)["routing"] == "float32":
        weighted = max(size, _FLOAT32_BYTES)
    else:
        weighted = size
    multiplying = size * (shape.hidden + 4 * width)
    reordering = 2 * shape.hidden * (size + weighted)
    return (shape.number("num_experts_per_tok") or 1) * max(multiplying, reordering)


def _attention_bytes(shape: ModelShape, tokens: int, *, padded: bool, eager: bool) -> int:
    """Return the bytes while attention computes, without the cache."""
    live = live_tensors(shape.model_type)
    size = shape.dtype_bytes
    query = shape.heads * shape.head_dim
    width = len(live["attention"]) * shape.hidden + query
    width += len(live["fused"]) * (query + 2 * shape.kv_heads * shape.head_dim)
    mask = _mask_bytes(shape, tokens, padded=padded, eager=eager)
    if shape.kv_heads < shape.heads and (mask or eager or _is_windowed(shape, tokens)):
        width += 2 * query  # keys and values, repeated for all heads
    if not eager:
        width += 2 * query  # the result, and its copy in the order of tokens
        return tokens * (width * size + _rotary_bytes(shape, live)) + mask
    each = 0
    for name in (*live["scores"], *live["kept"]):
        if name == _FLOAT32_COPY and size == _FLOAT32_BYTES:
            continue  # the scores are float32 already, so softmax copies nothing
        if name.startswith("float32"):
            each += _FLOAT32_BYTES
        else:
            each += size
    scores = shape.heads * tokens * tokens * each
    return tokens * (width * size + _rotary_bytes(shape, live)) + mask + scores


def _rotary_bytes(shape: ModelShape, live: Mapping[str, Any]) -> int:
    """Return the bytes of one token's cosines and sines."""
    if live["rotary"] == "none" or shape.model_type in FAMILIES["types"]["without_rotary"]:
        return 0
    size = _FLOAT32_BYTES if live["rotary"] == "float32" else shape.dtype_bytes
    return 2 * shape.head_dim * size


def _mask_bytes(shape: ModelShape, tokens: int, *, padded: bool, eager: bool) -> int:
    """Return the bytes of a row's own masks: eager attention adds them, sdpa reads booleans."""
    masks = 1
    kinds = {cache.kind for cache in layer_caches(shape, kv_element_bytes=shape.dtype_bytes)}
    if len(kinds) > 1:
        masks = 2  # one for all tokens, one for the window
    if eager:
        return masks * tokens * tokens * shape.dtype_bytes
    if padded:
        return masks * tokens * tokens
    return 0


def _is_windowed(shape: ModelShape, tokens: int) -> bool:
    """Return whether a window is shorter than the prompt, so that sdpa needs a mask for it."""
    for cache in layer_caches(shape, kv_element_bytes=shape.dtype_bytes):
        if cache.kind == "sliding" and cache.window_tokens < tokens:
            return True
    return False


def shared_mask_bytes(shape: ModelShape, tokens: int, *, eager: bool) -> int:
    """Return the bytes of the one mask that all rows share: a window's, for sdpa."""
    if eager or not _is_windowed(shape, tokens):
        return 0
    return tokens * tokens


def _first_logits_bytes(shape: ModelShape, tokens: int, *, beams: bool) -> int:
    """Return the bytes when the prompt's last logits are copied to float32."""
    copies = 2 if beams else 1
    logits = shape.vocab * (shape.dtype_bytes + copies * _FLOAT32_BYTES)
    return logits + tokens * shape.hidden * shape.dtype_bytes


def _decode_bytes(
    shape: ModelShape,
    caches: Sequence[LayerCache],
    tokens: int,
    *,
    eager: bool,
    beams: bool,
) -> int:
    """Return the bytes of the last decoding step."""
    size = shape.dtype_bytes
    cached = 0
    largest = 0
    for cache in caches:
        held = tokens
        if cache.kind == "sliding":
            held = min(tokens, cache.window_tokens)
        cached += held * cache.token_bytes
        largest = max(largest, held * cache.token_bytes)
    # The float32 logits of the step before stay until the next ones replace them.
    before = _FLOAT32_BYTES * shape.vocab
    copies = 3 if beams else 2
    logits = shape.vocab * (size + copies * _FLOAT32_BYTES)
    # torch.cat makes a layer's keys or values anew, next to the old ones.
    moments = [logits, before + largest // 2]
    if eager:
        each = 2 * _FLOAT32_BYTES + (size % _FLOAT32_BYTES)
        scores = shape.heads * tokens * each
        if shape.kv_heads < shape.heads:
            scores += 2 * tokens * shape.heads * shape.head_dim * size
        moments.append(before + scores)
    return tokens * _ID_BYTES + cached + max(moments)


_TRACE_HINT: Final = (
    "use --trace, which runs the model's own code under fake tensors (needs torch and transformers)"
)


# How far the closed form may be off, as shares of what it counts beyond the weights: measured
# against traces of twenty small decoders. A family that holds one more tensor than
# live_tensors.toml says is off by about this much. Other versions of transformers hold another
# copy of the logits.
_UNCERTAIN_RATIO: Final = 0.08
_UNCERTAIN_LOGITS_BYTES: Final = 4
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
        peak = weights + _beyond_bytes(model, call)
        uncertainty = _uncertainty(model, call, peak - weights)
        ratio = 1 + reserved_ratio()
        reserved = round(peak * ratio)
        reserved_from = _RESERVED
        reserved_weights = round(weights * ratio)
    caches = layer_caches(model.shape, kv_element_bytes=model.shape.dtype_bytes)
    token = sum(cache.token_bytes for cache in caches)
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
    rows = call.batch_size * call.num_beams
    # A call whose peak is in a layer holds no logits there, so they add nothing then.
    logits = min(rows * model.shape.vocab * _UNCERTAIN_LOGITS_BYTES, beyond_bytes // 4)
    sources = (
        _UNCERTAIN_RATIO * beyond_bytes,
        0.5 * logits,
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


def _beyond_bytes(model: Model, call: PlannedCall) -> int:
    """Return the peak beyond the weights in closed form."""
    if call.cache_implementation is not None:
        raise SettingError(
            f"the closed form supports only the dynamic cache, not {call.cache_implementation!r}",
            hint=_TRACE_HINT,
        )
    eager = call.attn_implementation == "eager"
    row = generate_row_bytes(
        model.shape,
        call.prompt_tokens,
        call.max_new_tokens,
        eager=eager,
        beams=call.num_beams > 1,
    )
    mask = shared_mask_bytes(model.shape, call.prompt_tokens, eager=eager)
    return call.batch_size * call.num_beams * row + mask
