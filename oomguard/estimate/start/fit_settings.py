"""Find the nearest settings with which a start fits, one setting at a time.

If no setting alone is enough, it also uses the highest utilization.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB, MIB
from oomguard.estimate.model.model import Model
from oomguard.estimate.model.shape import ModelShape
from oomguard.estimate.start.encoder_profile import NO_IMAGES, encoder_of, items_per_prompt
from oomguard.estimate.start.fixed_parts import counts_graphs, cuda_graphs
from oomguard.estimate.start.start import StartBudget, VllmSettings
from oomguard.estimate.start.start_budget import budget_start

# A step of fewer tokens makes a prefill disproportionately slow. Fewer sequences than this do not
# make a useful server.
_FEWEST_STEP_TOKENS: Final = 512
_FEWEST_SEQS: Final = 1
_SHORTEST_TOKENS: Final = 16
_MOST_RANKS: Final = 64
_UTILIZATION_STEP: Final = 0.001
_LARGEST_GPU_BYTES: Final = 1 << 42


@dataclass(frozen=True, slots=True)
class Fit:
    """Report the nearest settings that fit.

    Attributes:
        budget: the budget with them; None if no setting helps.
        changed: each changed setting with its old and new value.
        tensor_parallel_size: if no setting helps, the fewest ranks that would; None if none would.
        gpu_total_bytes: if no setting helps, the smallest device that would.
        without_images: if no setting helps, whether it would fit without images in prompts.
        cpu_offload_bytes: if no setting helps, the smallest offload of weights to the host, in
            whole GiB.
    """

    budget: StartBudget | None
    changed: tuple[tuple[str, Any, Any], ...] = ()
    tensor_parallel_size: int | None = None
    gpu_total_bytes: int | None = None
    without_images: bool = False
    cpu_offload_bytes: int | None = None


Permits = Callable[[str, Any, Any], bool]


def _anything(_name: str, _old: Any, _new: Any) -> bool:
    return True


def fit(model: Model, settings: VllmSettings, permits: Permits = _anything) -> Fit:
    """Find the smallest change with which a start fits with its margin.

    Changes that preserve outputs and capacity come first.

    Args:
        model: the model.
        settings: the requested settings.
        permits: judges each change by the setting's name, its old and its new value. If it refuses
            a change, the search continues with another.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        SettingError: the engine would reject the requested settings.
    """
    found = _solved(model, settings, permits)
    if found is not None:
        return found
    # On another device the engine has other defaults, so the search begins with the user's
    # settings, without defaults.
    ranks = _ranks(model, settings)
    gpu = _gpu(model, settings)
    offload = _offload(model, settings)
    return Fit(None, (), ranks, gpu, _without_images(model, settings), offload)


def _solved(model: Model, settings: VllmSettings, permits: Permits) -> Fit | None:
    """Return the first sufficient change of settings, or None."""
    asked = budget_start(model, settings)
    if asked.fits:
        return Fit(asked)
    filled = asked.settings
    for start in (filled, _at_ceiling(model, filled)):
        for name, solver in _SOLVERS.items():
            if start is None or (settings.device == "cpu" and name not in _ON_CPU):
                continue
            found = solver(model, start)
            if found is not None:
                changed = tuple(_changes(filled, found))
            else:
                changed = ()
            if found is not None and all(permits(*change) for change in changed):
                return Fit(budget_start(model, found), changed)
    return None


def _without_images(model: Model, settings: VllmSettings) -> bool:
    if model.encoder is None or settings.limit_mm_per_prompt == NO_IMAGES:
        return False
    return _solved(model, replace(settings, limit_mm_per_prompt=NO_IMAGES), _anything) is not None


def _fits(model: Model, settings: VllmSettings) -> bool:
    return budget_start(model, settings).fits


def _fits_somehow(model: Model, settings: VllmSettings) -> bool:
    """Return whether the start fits at this or any other utilization."""
    return _fits(model, settings) or _utilization(model, settings) is not None


def _ceiling(settings: VllmSettings, not_free_bytes: int) -> float:
    """Return the largest utilization that the free memory at the start allows, in whole steps."""
    free = (settings.gpu_total_bytes - not_free_bytes) / settings.gpu_total_bytes
    return max(0.0, _in_steps(math.floor, free))


def _in_steps(rounded: Callable[[float], int], ratio: float) -> float:
    """Round a utilization to a whole step, like a person would write it."""
    if rounded is math.ceil:
        nudge = -1e-9
    else:
        nudge = 1e-9
    return round(rounded(ratio / _UTILIZATION_STEP + nudge) * _UTILIZATION_STEP, 3)


def _at_ceiling(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """Return the settings with the highest utilization at which all parts fit on the device.

    Returns None if they already have it.
    """
    if settings.kv_cache_memory_bytes is not None:
        return None
    ceiling = _ceiling(settings, _outside(settings, model.shape, budget_start(model, settings)))
    if 0 < ceiling != settings.gpu_memory_utilization:
        return replace(settings, gpu_memory_utilization=ceiling)
    return None


def _outside(settings: VllmSettings, shape: ModelShape, budget: StartBudget) -> int:
    """Return the bytes outside the utilization: not free at the start, CUDA graphs, sampling.

    Unmeasured graphs count with the upper end of their range, because a start that fails for them
    fails last.
    """
    if counts_graphs(settings, shape):
        graphs = 0
    else:
        graphs = budget.cudagraph_bytes
    if graphs and settings.correction is None:
        graphs += cuda_graphs(budget.settings, shape).uncertainty_bytes
    return budget.not_free_bytes + graphs + budget.stages[-1].unprofiled_bytes


def _utilization(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """Return the smallest higher utilization that fits, or else the largest lower one.

    By the memory equation the pool grows by the device's size times the change, and nothing else
    changes.
    """
    budget = budget_start(model, settings)
    top = _ceiling(settings, budget.not_free_bytes)
    if (
        settings.kv_cache_memory_bytes is not None
    ):  # the utilization then only decides whether the engine begins
        candidate = replace(settings, gpu_memory_utilization=top)
        if 0 < top < settings.gpu_memory_utilization and _fits(model, candidate):
            return candidate
        return None
    lacking = (budget.uncertainty_bytes - budget.margin_bytes) / settings.gpu_total_bytes
    now = settings.gpu_memory_utilization
    least = _in_steps(math.ceil, now + lacking)
    higher = (least, least + _UTILIZATION_STEP) if lacking > 0 else ()
    for value in (*higher, top, _ceiling(settings, _outside(settings, model.shape, budget))):
        candidate = replace(settings, gpu_memory_utilization=round(value, 3))
        if 0 < value <= top and value != now and _fits(model, candidate):
            return candidate
    return None


def _pool(model: Model, settings: VllmSettings) -> VllmSettings | None:
    """Solve a KV cache set in bytes.

    Grow it to the need of one request, or shrink it to the device's remaining memory.
    """
    now = settings.kv_cache_memory_bytes
    if now is None:
        return None
    budget = budget_start(model, settings)
    beyond = max(stage.used_bytes for stage in budget.stages) - settings.gpu_total_bytes
    needed = -(-max(stage.needed_bytes for stage in budget.stages) // MIB) * MIB
    if now < needed:
        value = needed
    else:
        value = (now - beyond - budget.uncertainty_bytes) // MIB * MIB
    if not 0 < value != now:
        return None
    changed = budget_start(model, replace(settings, kv_cache_memory_bytes=value))
    if changed.fits:
        return changed.settings
    return None


def _largest(
    model: Model, low: int, high: int, make: Callable[[int], VllmSettings], *, multiple: int = 1
) -> VllmSettings | None:
    """Return the settings with the largest multiple from ``low`` to below ``high`` that fits."""
    low = -(-low // multiple)
    high = (high - 1) // multiple
    if high < low or not _fits(model, make(low * multiple)):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(model, make(middle * multiple)) else (low, middle - 1)
    return make(low * multiple)


def _step_tokens(model: Model, settings: VllmSettings) -> VllmSettings | None:
    now = settings.max_num_batched_tokens or 0
    rows = settings.max_num_seqs or 1
    return _largest(
        model,
        max(_FEWEST_STEP_TOKENS, rows),
        now,
        lambda n: replace(settings, max_num_batched_tokens=n),
        multiple=256,
    )


def _eager(model: Model, settings: VllmSettings) -> VllmSettings | None:
    if settings.enforce_eager:
        return None
    eager = replace(settings, enforce_eager=True)
    if _fits(model, eager):
        return eager
    return None


def _seqs(model: Model, settings: VllmSettings) -> VllmSettings | None:
    now = settings.max_num_seqs or 0
    if now > 8 and _fits(model, replace(settings, max_num_seqs=8)):
        multiple = 8
    else:
        multiple = 1
    return _largest(
        model, _FEWEST_SEQS, now, lambda n: replace(settings, max_num_seqs=n), multiple=multiple
    )


def _length(model: Model, settings: VllmSettings) -> VllmSettings | None:
    now = settings.max_model_len or 0  # at most the model's own length: the estimator rejects more
    shortest = _SHORTEST_TOKENS
    encoder = encoder_of(model, settings)
    if (
        encoder is not None
        and encoder.in_prompt
        and items_per_prompt(settings.limit_mm_per_prompt, encoder)
    ):
        shortest = max(
            shortest, encoder.tokens_per_item + 1
        )  # the engine would refuse a prompt with an image
    return _largest(
        model,
        shortest,
        now,
        lambda n: replace(settings, max_model_len=n),
        multiple=_SHORTEST_TOKENS,
    )


def solve(model: Model, settings: VllmSettings, name: str) -> StartBudget | None:
    """Return the budget with one setting changed so that the start fits, or None."""
    if name not in _SOLVERS or (settings.device == "cpu" and name not in _ON_CPU):
        return None
    asked = budget_start(model, settings)
    if asked.is_expected_to_fit:
        return None  # the start failed for a reason that the model does not cover
    found = _SOLVERS[name](model, asked.settings)
    if found is None:
        return None
    return budget_start(model, found)


# Ordered by cost: outputs and capacity preserved, then speed, then concurrency, then length.
_SOLVERS: Final = {
    "kv_cache_memory_bytes": _pool,
    "gpu_memory_utilization": _utilization,
    "max_num_batched_tokens": _step_tokens,
    "enforce_eager": _eager,
    "max_num_seqs": _seqs,
    "max_model_len": _length,
}
# The CPU backend has no graphs, and no formula covers its profile.
_ON_CPU: Final = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization", "max_model_len"})


def _changes(old: VllmSettings, new: VllmSettings) -> Iterator[tuple[str, Any, Any]]:
    for name in _SOLVERS:
        before = getattr(old, name)
        after = getattr(new, name)
        if before != after:
            yield name, before, after


def _ranks(model: Model, settings: VllmSettings) -> int | None:
    """Return the smallest number of ranks, doubling, with which the sharded layers would fit."""
    ranks = settings.tensor_parallel_size * 2
    while ranks <= _MOST_RANKS:
        with contextlib.suppress(SettingError):  # a number of ranks that does not divide the heads
            if _fits_somehow(model, replace(settings, tensor_parallel_size=ranks)):
                return ranks
        ranks *= 2
    return None


def _offload(model: Model, settings: VllmSettings) -> int | None:
    """Return the smallest offload to the host in whole GiB with which it would fit, or None."""
    if settings.device == "cpu":
        return None
    most = -(-max(stage.weights_bytes for stage in budget_start(model, settings).stages) // GIB)
    low = settings.cpu_offload_bytes // GIB + 1
    high = most
    if high < low or not _fits_somehow(model, replace(settings, cpu_offload_bytes=high * GIB)):
        return None
    while low < high:
        middle = (low + high) // 2
        fits = _fits_somehow(model, replace(settings, cpu_offload_bytes=middle * GIB))
        low, high = (low, middle) if fits else (middle + 1, high)
    return low * GIB


def _gpu(model: Model, settings: VllmSettings) -> int | None:
    """Return the smallest device in whole MiB with which the same settings would fit."""
    low = settings.gpu_total_bytes // MIB
    high = _LARGEST_GPU_BYTES // MIB
    if not _fits_somehow(model, _on(settings, high * MIB)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if _fits_somehow(model, _on(settings, middle * MIB))
            else (middle + 1, high)
        )
    if _fits_somehow(model, _on(settings, low * MIB)):
        return low * MIB
    return None


def _on(settings: VllmSettings, total_bytes: int) -> VllmSettings:
    """Return the settings on a device of another size with the same bytes not free."""
    free = settings.device_free_bytes
    if free is not None:
        free = total_bytes - (settings.gpu_total_bytes - free)
    return replace(settings, gpu_total_bytes=total_bytes, device_free_bytes=free)
