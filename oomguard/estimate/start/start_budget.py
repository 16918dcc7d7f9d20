"""Estimate the bytes of each GPU when vLLM starts a model, before anything runs.

The pool of the KV cache is the rest of the utilization: ``total * utilization - weights -
activation peak - non-torch memory - CUDA graphs``. The last part counts only in some versions
(vllm/v1/worker/gpu_worker.py, determine_available_memory, 0.33).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB, MIB, format_gib
from oomguard.estimate.constants import (
    constant,
    measured_groups,
    pool_range,
    rows_of,
    since,
    tables,
)
from oomguard.estimate.model.model import Model
from oomguard.estimate.model.quantization import is_nvfp4, quantization_config
from oomguard.estimate.model.shape import ModelShape
from oomguard.estimate.start.activations import (
    ActivationPeak,
    peak_activation,
    prompt_logprobs_bytes,
)
from oomguard.estimate.start.fixed_parts import (
    LAST_OF_FIRST,
    FixedParts,
    by_engine,
    counts_graphs,
    cuda_graphs,
    fixed_parts,
    free_uncertain_bytes,
    is_first_engine,
    old_driver_note,
    page_cache_bytes,
    uncertainties,
)
from oomguard.estimate.start.kv_cache import StartCaches, start_caches
from oomguard.estimate.start.start import (
    NO_IMAGES,
    Correction,
    Stage,
    StartBudget,
    VllmSettings,
    architecture_of,
    has_nvlink,
    is_rocm,
    is_unmeasured_platform,
    known_gpu,
    refuse_impossible,
    with_defaults,
)
from oomguard.estimate.start.weights import StartWeights, first_of_fullest, start_weights

if TYPE_CHECKING:
    from oomguard.estimate.start.encoder_profile import EncoderProfile

# The spread of a planned pool comes from its parts' own and from a share of the device.
#
# Each kind of start has factors of that spread, because some kinds are known far better than
# others. benchmarks/fit_constants.py measures the factors and writes them to fitted.toml: it
# predicts each group of a version and a device from the others.


def spread_bytes(settings: VllmSettings, parts_bytes: float) -> float:
    """Return the spread of a pool from that of its fitted parts in bytes."""
    share = float(tables()["defaults"]["spread_of_device_ratio"]) * settings.gpu_total_bytes
    return math.hypot(share, parts_bytes)


# A plan reserves some of the pool, because other starts used more than the known parts.
#
# A pool that is planned too large costs a start, one that is too small costs some requests. So a
# plan's number is not the average but one that most starts reached. A version and GPU with several
# measured starts need no reserve.


def reserve_bytes(settings: VllmSettings, spread: float, kind: str = "one_gpu") -> int:
    """Return the bytes that a plan reserves from a start's pool.

    Args:
        settings: vLLM's settings with all defaults filled in.
        spread: the spread of the pool in bytes.
        kind: the kind of start, by ``range_kind``.
    """
    is_known = settings.correction is not None or settings.kv_cache_memory_bytes is not None
    if settings.device == "cpu" or is_known or _is_measured(settings):
        return 0
    return round(pool_range(kind)["reserve_ratio"] * spread)


def range_kind(settings: VllmSettings, *, profiles_encoder: bool) -> str:
    """Return the kind of a start, which decides how well its pool is known.

    Args:
        settings: vLLM's settings with all defaults filled in.
        profiles_encoder: whether the start profiles an encoder.
    """
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if settings.unified_memory or is_rocm(settings):
        return "other_memory"
    if profiles_encoder:
        return "encoder"
    if ranks > 1:
        if by_engine(settings) <= LAST_OF_FIRST:
            return "first_engine_ranks"
        return "ranks"
    if since("memory_by_driver_since", settings.version):
        return "since_0_27"
    return "one_gpu"


def reserve_note(kept_bytes: int, kind: str) -> str:
    """Return the sentence about the reserve."""
    quantile = pool_range(kind)["reserve_quantile"]
    share = f"{quantile:.0%} of such starts of other versions and GPUs"
    return f"reserve: {format_gib(kept_bytes)}, the most that {share} used beyond these parts"


def _is_measured(settings: VllmSettings) -> bool:
    """Return whether the constants come from several starts of this version and GPU."""
    gpu = known_gpu(settings)
    version = settings.version
    return (
        gpu is not None and (f"{version.major}.{version.minor}", gpu["name"]) in measured_groups()
    )


# With an empty compile cache the peak has a minimum of about one embedding.
#
# A second start with the same settings loads the compiled graphs from vLLM's cache and has no such
# minimum. In some versions it may count the embedding's memory once more after the free.


def compile_floor_bytes(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the minimum peak of a compiling start on a rank with the embedding, or 0.

    A model of text and images uses its embedding before the compiled part.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    rule = constant("compile_floor", settings.version)
    tables = _tables_bytes(settings, shape)
    if tables:
        return tables + int(rule["base_bytes"])
    return 0


def pinned_bytes(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the bytes of the freed embedding that may remain next to a compiling start's peak.

    In some versions a small tensor can pin its block. Published starts had this on some machines
    only, for no reason that the sources show, so a plan mentions it but does not count it.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    if constant("compile_floor", settings.version).get("pinned"):
        return _tables_bytes(settings, shape)
    return 0


def _tables_bytes(settings: VllmSettings, shape: ModelShape) -> int:
    tables = int(constant("compile_floor", settings.version)["tables"])
    compiled = (
        settings.device != "cpu"
        and not settings.enforce_eager
        and not shape.has_encoder
        and not is_rocm(settings)
    )
    table = shape.vocab * shape.hidden * shape.dtype_bytes // settings.tensor_parallel_size
    if compiled:
        return tables * table
    return 0


# The uncertainty of the cache as a share of one request, if the configuration has unread fields.
_UNREAD_RATIO: Final = 0.8


@dataclass(frozen=True, slots=True)
class _Parts:
    """Hold the parts of a start; ``requested_bytes`` is what its utilization allows."""

    model: Model
    settings: VllmSettings
    requested_bytes: int
    weights: StartWeights
    caches: StartCaches
    fixed: FixedParts
    encoder: EncoderProfile | None
    reserve_bytes: int = 0


def budget_start(model: Model, settings: VllmSettings) -> StartBudget:
    """Estimate one start of vLLM.

    Args:
        model: the model, read with the settings' own data type, quantization and draft.
        settings: vLLM's settings; None values get the engine's defaults.

    Returns:
        The budget of the fullest GPU, in bytes, with the reasons if the start does not fit.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        SettingError: the engine would reject a setting, or oomguard does not know its value.
    """
    assumed = list(model.assumptions)
    parts = _parts(model, with_defaults(settings, model.shape, assumed), assumed)
    settings = parts.settings
    caches = parts.caches
    fixed = parts.fixed
    peaks = [_peak(parts, number) for number in range(settings.pipeline_parallel_size)]
    uncertain = _uncertain_parts(parts, peaks)
    spread = spread_bytes(settings, uncertain["activations"])
    kind = range_kind(settings, profiles_encoder=parts.encoder is not None)
    parts = replace(parts, reserve_bytes=reserve_bytes(settings, spread, kind))
    stages = tuple(_stage(parts, number, peak) for number, peak in enumerate(peaks))
    if settings.correction is None:
        cold = max(peak.compile_bytes for peak in peaks)
        pinned = max(peak.pinned_bytes for peak in peaks)
        saved = max(peak.saved_bytes for peak in peaks)
    else:
        cold = pinned = saved = 0
    if cold or pinned:
        assumed.append(_of_first_start(settings, cold, pinned))
    layers = caches.stages
    least = min(
        stages, key=lambda stage: caches.layout.blocks(stage.pool_bytes, layers[stage.number])
    )
    fullest = stages[first_of_fullest(parts.weights.stages_bytes)]
    if least.pool_bytes < fullest.pool_bytes:
        assumed.append(_of_least(least, fullest))
    if settings.correction is None:
        page_cache = page_cache_bytes(settings, fullest.weights_bytes)
    else:
        page_cache = 0
    if page_cache:
        assumed.append(
            f"unified memory: vLLM {settings.version} counts the host's page cache as its "
            f"own, up to {format_gib(page_cache)} more if it does not contain the weight "
            "files yet"
        )
    if later := stages[-1].unprofiled_bytes:
        assumed.append(
            f"sampler: needs {format_gib(later)} more at its first use than this "
            "version's start reserves"
        )
    if older := old_driver_note(settings, fixed.cudagraph_bytes):
        assumed.append(older)
    if parts.reserve_bytes:
        assumed.append(reserve_note(parts.reserve_bytes, kind))
    if settings.correction is not None:
        assumed.append(f"parts as measured by {settings.correction.source}")
    below = above = math.hypot(*uncertain.values())
    if settings.correction is None and settings.device != "cpu":
        unknown = []
        for name, size in uncertain.items():
            if name != "activations":
                unknown.append(size)
        below = math.hypot(pool_range(kind)["factor_below"] * spread, *unknown)
        above = math.hypot(pool_range(kind)["factor_above"] * spread, *unknown)
    more = pinned + saved
    if settings.compile_cache_entry is not False:
        more += cold
    blocks = caches.layout.blocks(least.pool_bytes, layers[least.number])
    by_concurrency = since("tokens_by_concurrency_since", settings.version)
    if by_concurrency:
        logged_tokens = caches.layout.tokens
    else:
        logged_tokens = caches.layout.tokens_of_groups
    limit = max(settings.max_model_len or 0, model.shape.max_positions or 0)
    # A request is in every stage, so the stage with the shortest one limits its length.
    longest = []
    for stage in stages:
        longest.append(caches.layout.longest(stage.pool_bytes, limit, layers[stage.number]))
    return StartBudget(
        model=model.name,
        settings=settings,
        requested_bytes=parts.requested_bytes,
        weights_bytes=parts.weights.own_bytes(fullest.number),
        draft_weights_bytes=parts.weights.drafts_bytes[fullest.number],
        lora_bytes=parts.weights.lora_bytes[fullest.number],
        peak_activation_bytes=fullest.peak_activation_bytes,
        compile_bytes=cold,
        page_cache_bytes=page_cache,
        cudagraph_bytes=fixed.cudagraph_bytes,
        non_torch_bytes=fixed.non_torch_bytes,
        not_free_bytes=fixed.not_free_bytes,
        prompt_logprobs_bytes=_prompt_logprobs(model, settings),
        kv_cache_pool_bytes=fullest.pool_bytes,
        kv_bytes_per_token=caches.token_bytes(layers[fullest.number]),
        kv_cache_blocks=blocks,
        block_tokens=caches.layout.block_tokens,
        kv_cache_tokens=logged_tokens(blocks),
        max_concurrency=caches.layout.max_concurrency(blocks),
        longest_request_tokens=min(longest),
        uncertainty_bytes=round(math.hypot(below, page_cache)),
        uncertainty_above_bytes=round(above) + more,
        more_bytes=more,
        stages=stages,
        assumptions=(*assumed, *_of_platform(settings)),
        reasons=tuple(_reasons(parts, stages)),
        kept_back_bytes=parts.reserve_bytes,
        unread=(*model.unread, *("gpu_name" for _ in _of_platform(settings))),
        little_known=_little_known(model.shape, settings),
        uncertain_part=max(uncertain, key=lambda part: uncertain[part]),
        free_short_bytes=_free_short_bytes(parts),
        free_uncertain_bytes=free_uncertain_bytes(settings),
    )


def _of_first_start(settings: VllmSettings, cold_bytes: int, pinned_bytes: int) -> str:
    """Return the sentence about a first and a second start, and the next one if predictable."""
    sentence = "activations: of a first start, which compiles"
    if cold_bytes:
        sentence += f"; a second one leaves {format_gib(cold_bytes)} more"
    if pinned_bytes:
        sentence += (
            f"; some starts of vLLM {settings.version} leave {format_gib(pinned_bytes)} more, "
            "because they return the loaded embedding"
        )
    if settings.compile_cache_entry is None:
        return sentence
    if settings.compile_cache_entry:
        return (
            f"{sentence}; the next start may be such a second one, because the compile cache "
            "has an entry of a similar model"
        )
    return (
        f"{sentence}; the next start is a first one, because the compile cache has no entry "
        "of such a model on as many GPUs"
    )


def _of_least(least: Stage, shown: Stage) -> str:
    """Return the sentence about the stage with the smallest pool, which limits all others.

    Source: get_kv_cache_configs in vllm/v1/core/kv_cache_utils.py.
    """
    held = (
        f"{format_gib(least.peak_activation_bytes)} of activations leave it "
        f"{format_gib(least.pool_bytes)}"
    )
    return (
        f"pipeline: the tokens are for stage {least.number}, {held}; the parts are for "
        f"stage {shown.number}, which vLLM logs first"
    )


def _parts(model: Model, settings: VllmSettings, assumed: list[str]) -> _Parts:
    refuse_impossible(settings, model.shape)
    correction = settings.correction or Correction("")
    weights = start_weights(model, settings, correction.weights_bytes, assumed)
    if settings.device_free_from:
        assumed.append(settings.device_free_from)
    return _Parts(
        model,
        settings,
        math.ceil(settings.gpu_total_bytes * settings.gpu_memory_utilization),
        weights,
        start_caches(model, settings),
        fixed_parts(settings, model.shape),
        _encoder(model, settings, assumed),
    )


def _encoder(model: Model, settings: VllmSettings, assumed: list[str]) -> EncoderProfile | None:
    """Estimate the encoder's profile and record it as an assumption; None if absent or disabled."""
    if not model.shape.has_encoder or settings.device == "cpu":
        return None
    if settings.skip_mm_profiling:
        assumed.append(
            "images, audio and video: not profiled (skip_mm_profiling), so the encoder "
            "needs additional memory"
        )
        return None
    from oomguard.estimate.start.encoder_profile import encoder_of, profile_encoder

    if (encoder := encoder_of(model, settings)) is None:
        assumed.append(
            "images, audio and video: the estimate excludes the encoder's memory while "
            "vLLM profiles it"
        )
        return None
    found = profile_encoder(encoder, settings, model.shape.dtype_bytes)
    if found is not None:
        others = {"image": "audio and video are", "video": "audio is"}.get(
            found.modality, "video is"
        )
        assumed.append(f"{found}; {others} not counted")
    return found


def _prompt_logprobs(model: Model, settings: VllmSettings) -> int:
    if not settings.prompt_logprobs:
        return 0
    step = settings.max_num_batched_tokens or 0
    longest = settings.max_model_len or 0
    return prompt_logprobs_bytes(model.shape, settings.version, step, longest, settings.device)


def _peak(parts: _Parts, number: int) -> ActivationPeak:
    """Return the activation peak of a stage.

    It is the language model's with the encoder's outputs, or the encoder's own.
    """
    settings = parts.settings
    encoder = parts.encoder
    peak = peak_activation(
        parts.model.shape,
        settings.version,
        rows=_profiled_rows(parts),
        step_tokens=settings.max_num_batched_tokens or 0,
        tensor_parallel_size=settings.tensor_parallel_size,
        first_stage=number == 0,
        last_stage=number == settings.pipeline_parallel_size - 1,
        longest_tokens=settings.max_model_len or 0,
        whole_experts=settings.enable_expert_parallel,
        eager=settings.enforce_eager or is_first_engine(settings),
    )
    if encoder is not None and number == 0:
        larger = max(encoder.peak_bytes, peak.bytes + encoder.outputs_bytes)
        if larger == encoder.peak_bytes:
            uncertainty = encoder.uncertainty_bytes
        else:
            uncertainty = peak.uncertainty_bytes
        saved = min(
            peak.saved_bytes, max(0, peak.bytes + encoder.outputs_bytes - encoder.peak_bytes)
        )
        peak = replace(peak, bytes=larger, uncertainty_bytes=uncertainty, saved_bytes=saved)
    if number == 0:
        floor = compile_floor_bytes(settings, parts.model.shape)
    else:
        floor = 0
    cold = max(0, floor - peak.bytes)
    if number == 0:
        pinned = max(0, pinned_bytes(settings, parts.model.shape) - peak.workspace_bytes)
    else:
        pinned = 0
    counted = peak.bytes + cold + pinned
    peak = replace(peak, bytes=counted, compile_bytes=cold, pinned_bytes=pinned)
    corrected = settings.peak_activation_ratio * peak.bytes
    if settings.correction is None:
        beyond = 0
    else:
        beyond = settings.correction.peak_activation_bytes
    return replace(peak, bytes=max(0, round(corrected) + beyond))


def _profiled_rows(parts: _Parts) -> int:
    """Return the requests in the sampler's profile."""
    settings = parts.settings
    rows = settings.max_num_seqs or 0
    if parts.model.encoder is None:
        return rows
    from oomguard.estimate.start.encoder_profile import encoder_of, profiled_seats, profiles_seats

    encoder = encoder_of(parts.model, settings)
    if encoder is not None and profiles_seats(settings.version):
        return profiled_seats(encoder, settings)
    return rows


def _stage(parts: _Parts, number: int, peak: ActivationPeak) -> Stage:
    settings = parts.settings
    fixed = parts.fixed
    layout = parts.caches.layout
    held = parts.weights.stages_bytes[number]
    layers = parts.caches.stages[number]
    pool = settings.kv_cache_memory_bytes
    if pool is None:
        pool = (
            parts.requested_bytes
            - held
            - peak.bytes
            - fixed.non_torch_bytes
            - fixed.counted_cudagraph_bytes
        )
        pool -= parts.reserve_bytes
    if settings.device == "cpu":
        later = 0
    else:
        later = max(0, peak.sampling_bytes - peak.bytes)
    return Stage(
        number,
        held,
        peak.bytes,
        pool,
        layout.request_bytes(stage=layers),
        layout.block_bytes(layers),
        later,
        used_bytes=held + peak.bytes + max(0, pool) + later + fixed.used_bytes,
    )


def _uncertain_parts(parts: _Parts, peaks: list[ActivationPeak]) -> dict[str, float]:
    """Return the uncertainty of each independent part of the pool in bytes, by its name."""
    settings = parts.settings
    peak = max(peak.uncertainty_bytes for peak in peaks)
    found: dict[str, float] = {
        "activations": math.hypot(*uncertainties(settings, parts.fixed, peak))
    }
    if settings.correction is None:
        found["weights"] = parts.model.weights_uncertainty_ratio * max(parts.weights.stages_bytes)
    if not parts.model.exact:
        layout = parts.caches.layout
        requests = [layout.request_bytes(stage=layers) for layers in parts.caches.stages]
        found["KV cache"] = _UNREAD_RATIO * max(requests)
    return found


def _little_known(shape: ModelShape, settings: VllmSettings) -> str | None:
    """Return what is not understood of such a start, or None if a start of the model was measured.

    constants.toml has the conditions, each with its evidence.
    """
    if settings.correction is not None or settings.device == "cpu":
        return None
    method = settings.quantization or (quantization_config(shape) or {}).get("quant_method")
    own = {
        "architecture": architecture_of(settings),
        "nvlink": has_nvlink(settings),
        "unified": settings.unified_memory,
        "nvfp4": is_nvfp4(shape),
        "weights": method,
        "first_engine": by_engine(settings) <= LAST_OF_FIRST,
    }
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    for row in rows_of("little_known", settings.version):
        others = []
        for name, value in own.items():
            if row.get(name, value) != value:
                others.append(name)
        is_type = shape.model_type in row.get("model_types", [shape.model_type])
        is_wide = ranks >= row.get("fewest_ranks", 1)
        is_long = (settings.max_num_batched_tokens or 0) >= row.get("fewest_step_tokens", 0)
        if not others and is_type and is_wide and is_long:
            return f"{row['what']}: {row['evidence']}"
    return None


def _of_platform(settings: VllmSettings) -> Iterator[str]:
    """Yield the sentence about a device of a platform without measured starts."""
    if is_unmeasured_platform(settings):
        yield (
            f"{settings.gpu_name}: no start of vLLM on such a device was measured, so the parts "
            "are those of a CUDA GPU"
        )


def _free_short_bytes(parts: _Parts) -> int:
    """Return how much more memory the engine asks for than is free at its start; 0 or more.

    The first engine does not ask: init_device in vllm/worker/worker.py of 0.8.5 has no such check.
    """
    if parts.settings.device != "cpu" and by_engine(parts.settings) <= LAST_OF_FIRST:
        return 0
    free = parts.settings.gpu_total_bytes - parts.fixed.not_free_bytes
    return max(0, parts.requested_bytes - free)


def _reasons(parts: _Parts, stages: tuple[Stage, ...]) -> Iterator[str]:
    """Yield the reasons why the start does not fit."""
    settings = parts.settings
    requested = parts.requested_bytes
    total = settings.gpu_total_bytes
    free = total - parts.fixed.not_free_bytes
    if _free_short_bytes(parts):
        if settings.device_free_bytes is None:
            has = "an empty GPU has"
        else:
            has = "this one has"
        wants = f"the engine needs {format_gib(requested)} free at its start"
        yield f"{wants}, {has} {format_gib(free)}"
    for stage in stages:
        if len(stages) > 1:
            where = f" on pipeline stage {stage.number}"
        else:
            where = ""
        pool = format_gib(stage.pool_bytes)
        if stage.pool_bytes <= 0:
            yield f"nothing is left for the KV cache{where}: {pool}"
        elif not parts.caches.layout.fits(
            stage.pool_bytes, stage=parts.caches.stages[stage.number]
        ):
            length = settings.max_model_len
            need = format_gib(stage.request_bytes)
            yield (
                f"one request of {length} tokens needs {need} of KV cache{where}, but "
                f"{pool} is available"
            )
        if stage.used_bytes > total:
            yield f"all parts{where} take {format_gib(stage.used_bytes)} of {format_gib(total)}"


# The nearest settings with which a start fits come from the budget, one setting at a time.
#
# If no setting alone is enough, the highest utilization joins it.

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


def _image_tokens(model: Model, settings: VllmSettings) -> int:
    """Return the tokens of an image that a prompt must have room for, or 0."""
    if model.encoder is None:
        return 0
    from oomguard.estimate.start.encoder_profile import encoder_of, items_per_prompt

    encoder = encoder_of(model, settings)
    if encoder is None or not encoder.in_prompt:
        return 0
    if not items_per_prompt(settings.limit_mm_per_prompt, encoder):
        return 0
    return encoder.tokens_per_item


def _length(model: Model, settings: VllmSettings) -> VllmSettings | None:
    now = settings.max_model_len or 0  # at most the model's own length: the estimator rejects more
    shortest = max(_SHORTEST_TOKENS, _image_tokens(model, settings) + 1)
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
