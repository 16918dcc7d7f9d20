"""The settings nearest to the asked ones under which a model fits: solved one at a time, then together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.errors import SettingError
from oomguard.facts import MIB
from oomguard.memory.encoder import NO_IMAGES
from oomguard.memory.model_shape import ModelShape
from oomguard.memory.plan import counts_graphs, plan_vllm
from oomguard.memory.prepared import Prepared
from oomguard.memory_plan import MemoryPlan, VllmSettings

# A step of fewer tokens makes a prefill slow out of proportion; fewer sequences than this are no service.
_FEWEST_STEP_TOKENS: Final = 512
_FEWEST_SEQS: Final = 1
_SHORTEST_TOKENS: Final = 16
_MOST_RANKS: Final = 64
_UTILIZATION_STEP: Final = 0.001
_LARGEST_GPU_BYTES: Final = 1 << 42


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings that fit and what was changed to get there; ``plan`` None where nothing but other hardware or weights helps.

    ``tensor_parallel_size`` and ``gpu_total_bytes`` are then the smallest that would, None where none would; ``without_images``
    says that it would where no prompt has any.
    """

    plan: MemoryPlan | None
    changed: tuple[tuple[str, Any, Any], ...] = ()
    tensor_parallel_size: int | None = None
    gpu_total_bytes: int | None = None
    without_images: bool = False


Permits = Callable[[str, Any, Any], bool]


def _anything(_name: str, _old: Any, _new: Any) -> bool:
    return True


def fit(model: Prepared, settings: VllmSettings, permits: Permits = _anything) -> Fit:
    """Change the least that makes the plan fit with its margin: what keeps the outputs and the capacity first.

    ``permits`` judges each change by the setting's name, its value and the new one; what it refuses is solved in another way.
    """
    found = _solved(model, settings, permits)
    if found is not None:
        return found
    # On another device the engine's own defaults are others: what the user gave is searched with, not what was filled in.
    return Fit(None, (), _ranks(model, settings), _gpu(model, settings), _without_images(model, settings))


def _solved(model: Prepared, settings: VllmSettings, permits: Permits) -> Fit | None:
    """The first change of settings that is enough, None where none is."""
    asked = plan_vllm(model, settings)
    if asked.fits:
        return Fit(asked)
    filled = asked.settings
    for start in (filled, _at_ceiling(model, filled)):
        for name, solver in _SOLVERS.items():
            if start is None or (settings.device == "cpu" and name not in _ON_CPU):
                continue
            found = solver(model, start)
            changed = tuple(_changes(filled, found)) if found is not None else ()
            if found is not None and all(permits(*change) for change in changed):
                return Fit(plan_vllm(model, found), changed)
    return None


def _without_images(model: Prepared, settings: VllmSettings) -> bool:
    if model.encoder is None or settings.limit_mm_per_prompt == NO_IMAGES:
        return False
    return _solved(model, replace(settings, limit_mm_per_prompt=NO_IMAGES), _anything) is not None


def _fits(model: Prepared, settings: VllmSettings) -> bool:
    return plan_vllm(model, settings).has_margin


def _fits_somehow(model: Prepared, settings: VllmSettings) -> bool:
    """Whether it fits at this utilization or another."""
    return _fits(model, settings) or _utilization(model, settings) is not None


def _ceiling(settings: VllmSettings, context_bytes: int) -> float:
    """The largest utilization that what is free at the start allows, in whole steps."""
    free = (settings.gpu_total_bytes - context_bytes) / settings.gpu_total_bytes
    return max(0.0, _in_steps(math.floor, free))


def _in_steps(rounded: Callable[[float], int], ratio: float) -> float:
    """A utilization in whole steps, so that what is asked for is a number a person would write."""
    nudge = -1e-9 if rounded is math.ceil else 1e-9
    return round(rounded(ratio / _UTILIZATION_STEP + nudge) * _UTILIZATION_STEP, 3)


def _at_ceiling(model: Prepared, settings: VllmSettings) -> VllmSettings | None:
    """The settings with the highest utilization that the device allows and all parts together fit in, None where it is theirs."""
    if settings.kv_cache_memory_bytes is not None:
        return None
    ceiling = _ceiling(settings, _outside(settings, model.shape, plan_vllm(model, settings)))
    return replace(settings, gpu_memory_utilization=ceiling) if 0 < ceiling != settings.gpu_memory_utilization else None


def _outside(settings: VllmSettings, shape: ModelShape, plan: MemoryPlan) -> int:
    """What the utilization does not contain: what is not free at the start, graphs that are captured and sampling that comes on top."""
    graphs = 0 if counts_graphs(settings, shape) else plan.cudagraph_bytes
    return plan.context_bytes + graphs + plan.stages[-1].unprofiled_bytes


def _utilization(model: Prepared, settings: VllmSettings) -> VllmSettings | None:
    """The smallest higher utilization that fits, else the largest lower one: what the memory equation says, not habit.

    The pool grows by the device's size with the utilization, and nothing else changes.
    """
    plan = plan_vllm(model, settings)
    top = _ceiling(settings, plan.context_bytes)
    if settings.kv_cache_memory_bytes is not None:  # it decides over nothing but whether the engine begins
        candidate = replace(settings, gpu_memory_utilization=top)
        return candidate if 0 < top < settings.gpu_memory_utilization and _fits(model, candidate) else None
    lacking = (plan.uncertainty_bytes - plan.margin_bytes) / settings.gpu_total_bytes
    now = settings.gpu_memory_utilization
    least = _in_steps(math.ceil, now + lacking)
    higher = (least, least + _UTILIZATION_STEP) if lacking > 0 else ()
    for value in (*higher, top, _ceiling(settings, _outside(settings, model.shape, plan))):
        candidate = replace(settings, gpu_memory_utilization=round(value, 3))
        if 0 < value <= top and value != now and _fits(model, candidate):
            return candidate
    return None


def _pool(model: Prepared, settings: VllmSettings) -> VllmSettings | None:
    """A KV cache that the user set in bytes: as much as one request needs, or as much as the device has beside the rest."""
    now = settings.kv_cache_memory_bytes
    if now is None:
        return None
    plan = plan_vllm(model, settings)
    beyond = max(stage.used_bytes for stage in plan.stages) - settings.gpu_total_bytes
    needed = -(-max(stage.needed_bytes for stage in plan.stages) // MIB) * MIB
    value = needed if now < needed else (now - beyond - plan.uncertainty_bytes) // MIB * MIB
    if not 0 < value != now:
        return None
    changed = plan_vllm(model, replace(settings, kv_cache_memory_bytes=value))
    spare = settings.gpu_total_bytes - max(stage.used_bytes for stage in changed.stages)
    return changed.settings if changed.fits and spare >= changed.uncertainty_bytes else None


def _largest(
    model: Prepared, low: int, high: int, make: Callable[[int], VllmSettings], *, multiple: int = 1
) -> VllmSettings | None:
    """The largest value from ``low`` up to below ``high`` that fits, in whole multiples."""
    low, high = -(-low // multiple), (high - 1) // multiple
    if high < low or not _fits(model, make(low * multiple)):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(model, make(middle * multiple)) else (low, middle - 1)
    return make(low * multiple)


def _step_tokens(model: Prepared, settings: VllmSettings) -> VllmSettings | None:
    now = settings.max_num_batched_tokens or 0
    rows = settings.max_num_seqs or 1
    return _largest(
        model, max(_FEWEST_STEP_TOKENS, rows), now, lambda n: replace(settings, max_num_batched_tokens=n), multiple=256
    )


def _eager(model: Prepared, settings: VllmSettings) -> VllmSettings | None:
    if settings.enforce_eager:
        return None
    eager = replace(settings, enforce_eager=True)
    return eager if _fits(model, eager) else None


def _seqs(model: Prepared, settings: VllmSettings) -> VllmSettings | None:
    now = settings.max_num_seqs or 0
    multiple = 8 if now > 8 and _fits(model, replace(settings, max_num_seqs=8)) else 1
    return _largest(model, _FEWEST_SEQS, now, lambda n: replace(settings, max_num_seqs=n), multiple=multiple)


def _length(model: Prepared, settings: VllmSettings) -> VllmSettings | None:
    now = settings.max_model_len or 0  # never above the model's own: the plan refuses that
    return _largest(
        model, _SHORTEST_TOKENS, now, lambda n: replace(settings, max_model_len=n), multiple=_SHORTEST_TOKENS
    )


def solve(model: Prepared, settings: VllmSettings, name: str) -> MemoryPlan | None:
    """The plan with this one setting changed so that it fits, None where none of its values is enough."""
    if name not in _SOLVERS or (settings.device == "cpu" and name not in _ON_CPU):
        return None
    asked = plan_vllm(model, settings)
    if asked.fits:
        return None  # what failed is nothing that the model sees
    found = _SOLVERS[name](model, asked.settings)
    return None if found is None else plan_vllm(model, found)


# In the order of what they cost: outputs and capacity kept, then speed, then requests at once, then their length.
_SOLVERS: Final = {
    "kv_cache_memory_bytes": _pool, "gpu_memory_utilization": _utilization, "max_num_batched_tokens": _step_tokens,
    "enforce_eager": _eager, "max_num_seqs": _seqs, "max_model_len": _length,
}  # fmt: skip
# The CPU backend has no graphs, and what it holds while it profiles follows no formula of ours.
_ON_CPU: Final = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization", "max_model_len"})


def _changes(old: VllmSettings, new: VllmSettings) -> Iterator[tuple[str, Any, Any]]:
    for name in _SOLVERS:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield name, before, after


def _ranks(model: Prepared, settings: VllmSettings) -> int | None:
    """The smallest number of GPUs, doubling, over which the layers cut by tensor parallelism would fit."""
    ranks = settings.tensor_parallel_size * 2
    while ranks <= _MOST_RANKS:
        with contextlib.suppress(SettingError):  # heads that do not divide so
            if _fits_somehow(model, replace(settings, tensor_parallel_size=ranks)):
                return ranks
        ranks *= 2
    return None


def _gpu(model: Prepared, settings: VllmSettings) -> int | None:
    """The smallest device, in whole MiB, on which the same settings would fit."""
    low, high = settings.gpu_total_bytes // MIB, _LARGEST_GPU_BYTES // MIB
    if not _fits_somehow(model, _on(settings, high * MIB)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits_somehow(model, _on(settings, middle * MIB)) else (middle + 1, high)
    return low * MIB if _fits_somehow(model, _on(settings, low * MIB)) else None


def _on(settings: VllmSettings, total_bytes: int) -> VllmSettings:
    """The settings on a device of another size, of which the same bytes are not free."""
    free = settings.device_free_bytes
    if free is not None:
        free = total_bytes - (settings.gpu_total_bytes - free)
    return replace(settings, gpu_total_bytes=total_bytes, device_free_bytes=free)
