"""Estimate the bytes of each GPU when vLLM starts a model, before anything runs.

The pool of the KV cache is the rest of the utilization: ``total * utilization - weights -
activation peak - non-torch memory - CUDA graphs``. The last part counts only in some versions
(vllm/v1/worker/gpu_worker.py, determine_available_memory, 0.33).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from oomguard.core.facts import format_gib
from oomguard.estimate.constants import constant, measured_groups, pool_range, safety_reserve, since
from oomguard.estimate.model.model import Model
from oomguard.estimate.model.shape import ModelShape
from oomguard.estimate.start.activations import (
    ActivationPeak,
    peak_activation,
    prompt_logprobs_bytes,
)
from oomguard.estimate.start.encoder_profile import (
    EncoderProfile,
    encoder_of,
    profile_encoder,
    profiled_seats,
    profiles_seats,
)
from oomguard.estimate.start.fixed_parts import (
    FixedParts,
    fixed_parts,
    free_uncertain_bytes,
    is_first_engine,
    old_driver_note,
    page_cache_bytes,
    uncertainties,
)
from oomguard.estimate.start.kv_cache import StartCaches, start_caches
from oomguard.estimate.start.start import (
    Correction,
    Stage,
    StartBudget,
    VllmSettings,
    is_rocm,
    is_unmeasured_platform,
    known_gpu,
    refuse_impossible,
    with_defaults,
)
from oomguard.estimate.start.weights import StartWeights, first_of_fullest, start_weights

# The spread of a planned pool comes from its parts' own and from a share of the device.
#
# Published starts miss by less than the parts' own spreads where those are large, and by more where
# they are small, so the geometric mean with the share counts. benchmarks/fit_constants.py measures
# the constants and writes them to fitted.toml: it predicts each group of a version and a device
# from the others.


def spread_bytes(settings: VllmSettings, parts_bytes: float) -> float:
    """Return the spread of a pool from that of its fitted parts in bytes."""
    share = pool_range()["device_ratio"] * settings.gpu_total_bytes
    return share + math.sqrt(share * parts_bytes)


# A plan reserves some of the pool, because other starts used more than the known parts.
#
# A pool that is planned too large costs a start, one that is too small costs some requests. So a
# plan's number is not the average but one that most starts reached. A version and GPU with several
# measured starts need no reserve.


def reserve_bytes(settings: VllmSettings, spread: float) -> int:
    """Return the bytes that a plan reserves from a start's pool.

    Args:
        settings: vLLM's settings with all defaults filled in.
        spread: the spread of the pool in bytes.
    """
    is_known = settings.correction is not None or settings.kv_cache_memory_bytes is not None
    if settings.device == "cpu" or is_known or _is_measured(settings):
        return 0
    return round(safety_reserve()["spread_ratio"] * spread)


def reserve_note(kept_bytes: int) -> str:
    """Return the sentence about the reserve."""
    share = f"{safety_reserve()['quantile']:.0%} of starts of other versions and GPUs"
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
    parts = replace(parts, reserve_bytes=reserve_bytes(settings, spread))
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
        assumed.append(reserve_note(parts.reserve_bytes))
    if settings.correction is not None:
        assumed.append(f"parts as measured by {settings.correction.source}")
    below = above = math.hypot(*uncertain.values())
    if settings.correction is None and settings.device != "cpu":
        unknown = [size for name, size in uncertain.items() if name != "activations"]
        below = math.hypot(pool_range()["factor_below"] * spread, *unknown)
        above = math.hypot(pool_range()["factor_above"] * spread, *unknown)
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
        longest_request_tokens=min(
            caches.layout.longest(s.pool_bytes, limit, layers[s.number]) for s in stages
        ),
        uncertainty_bytes=round(math.hypot(below, page_cache)),
        uncertainty_above_bytes=round(above) + more,
        more_bytes=more,
        stages=stages,
        assumptions=(*assumed, *_of_platform(settings)),
        reasons=tuple(_reasons(parts, stages)),
        kept_back_bytes=parts.reserve_bytes,
        unread=(*model.unread, *("gpu_name" for _ in _of_platform(settings))),
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
    encoder = encoder_of(parts.model, parts.settings)
    if encoder is not None and profiles_seats(settings.version):
        return profiled_seats(encoder, settings)
    return settings.max_num_seqs or 0


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


def _of_platform(settings: VllmSettings) -> Iterator[str]:
    """Yield the sentence about a device of a platform without measured starts."""
    if is_unmeasured_platform(settings):
        yield (
            f"{settings.gpu_name}: no start of vLLM on such a device was measured, so the parts "
            "are those of a CUDA GPU"
        )


def _free_short_bytes(parts: _Parts) -> int:
    """Return how much more memory the engine asks for than is free at its start; 0 or more."""
    free = parts.settings.gpu_total_bytes - parts.fixed.not_free_bytes
    return max(0, parts.requested_bytes - free)


def _reasons(parts: _Parts, stages: tuple[Stage, ...]) -> Iterator[str]:
    """Yield the reasons why the start does not fit."""
    settings = parts.settings
    requested = parts.requested_bytes
    total = settings.gpu_total_bytes
    free = total - parts.fixed.not_free_bytes
    if requested > free:
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
