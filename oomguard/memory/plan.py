"""Where the bytes of each GPU go when vLLM starts with a model under given settings, before anything is started."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from oomguard.errors import SettingError
from oomguard.facts import format_gib
from oomguard.memory.activations import peak_activation, prompt_logprobs_bytes
from oomguard.memory.adapters import adapter_bytes
from oomguard.memory.constants import constant, since, tables
from oomguard.memory.encoder import EncoderProfile, profile
from oomguard.memory.engine_defaults import with_defaults
from oomguard.memory.kv_layout import KvLayout, KvSettings, lay_out
from oomguard.memory.layer_caches import LayerCache, keeps_latent, layer_caches
from oomguard.memory.model_runner import model_runner
from oomguard.memory.model_shape import ModelShape
from oomguard.memory.prepared import Prepared, element_bytes
from oomguard.memory.quantized import quantizes_cache
from oomguard.memory.weights import RankWeights, first_of_fullest, rank_weights, stage_layers
from oomguard.memory_plan import Correction, MemoryPlan, Stage, VllmSettings

KV_ELEMENT_BYTES: Final = {
    "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "fp8_inc": 1.0, "bfloat16": 2.0, "float16": 2.0, "float32": 4.0,
}  # fmt: skip
# A cache of layers that were not understood.
_UNREAD_RATIO: Final = 0.8


def plan_vllm(model: Prepared, settings: VllmSettings) -> MemoryPlan:
    """The budget of one start; raises ConfigError for the model's numbers and SettingError for a setting's."""
    assumed = list(model.assumptions)
    shape = model.shape
    settings = with_defaults(settings, shape, assumed)
    _check(settings, shape)
    weights = _weights(model, settings)
    weights, drafts, adapters = _with_extras(model, settings, weights, assumed)
    if settings.device_free_from:
        assumed.append(settings.device_free_from)
    correction = settings.correction or Correction("")
    held = tuple(size + correction.weights_bytes for size in weights.stages_bytes)
    weights = replace(weights, stages_bytes=held)
    caches = _caches(shape, settings) + _draft_caches(model, settings)
    layout = lay_out(caches, _kv_settings(model, settings, caches))
    constants = _constants(settings, shape)
    requested = math.ceil(settings.gpu_total_bytes * settings.gpu_memory_utilization)
    layers = _layers_of_stages(settings, shape, caches)
    images = _images(model, settings, assumed)
    stages, uncertainty = _stages(shape, settings, weights, constants, requested, layout, layers, images)
    if later := stages[-1].unprofiled_bytes:
        assumed.append(f"sampler: {format_gib(later)} more at its first use than this version's start reserves")
    blocks = min(layout.blocks(stage.pool_bytes, layers[stage.number]) for stage in stages)
    fullest = stages[first_of_fullest(weights)]
    length, tokens = settings.max_model_len or 0, settings.max_num_batched_tokens or 0
    limit = max(length, shape.max_positions or 0)
    sources = [uncertainty, constants["uncertainty"], round(model.weights_uncertainty_ratio * weights.fullest_bytes)]
    if settings.correction is not None:
        sources = list(_left_open(settings, correction, uncertainty, constants))
        assumed.append(f"parts as measured by {correction.source}")
    if not model.exact:
        sources.append(round(_UNREAD_RATIO * max(stage.request_bytes for stage in stages)))
    return MemoryPlan(
        model=model.name,
        settings=settings,
        requested_bytes=requested,
        weights_bytes=fullest.weights_bytes - adapters[fullest.number] - drafts[fullest.number],
        draft_weights_bytes=drafts[fullest.number],
        adapter_bytes=adapters[fullest.number],
        peak_activation_bytes=fullest.peak_activation_bytes,
        cudagraph_bytes=constants["cudagraphs"],
        non_torch_bytes=constants["non_torch"],
        context_bytes=constants["context"],
        prompt_logprobs_bytes=prompt_logprobs_bytes(shape, settings.version, tokens) if settings.prompt_logprobs else 0,
        kv_cache_pool_bytes=fullest.pool_bytes,
        kv_bytes_per_token=_bytes_per_token(caches, layers[fullest.number]),
        kv_cache_blocks=blocks,
        block_tokens=layout.block_tokens,
        kv_cache_tokens=layout.tokens(blocks),
        max_concurrency=layout.max_concurrency(blocks),
        longest_request_tokens=min(layout.longest(s.pool_bytes, limit, layers[s.number]) for s in stages),
        uncertainty_bytes=round(math.hypot(*sources)),
        stages=stages,
        assumptions=tuple(assumed),
        reasons=tuple(_reasons(settings, stages, requested, constants, layout, layers)),
    )


def _check(settings: VllmSettings, shape: ModelShape) -> None:
    """Raise SettingError for what the engine refuses before it looks at memory."""
    if settings.gpu_total_bytes <= 0:
        raise SettingError("a GPU of 0 bytes holds nothing", hint="--gpu-memory 24GiB")
    if settings.pipeline_parallel_size > shape.layers:
        raise SettingError(
            f"pipeline_parallel_size is {settings.pipeline_parallel_size}, the model has {shape.layers} layers"
        )
    ranks, attends = settings.tensor_parallel_size, "num_attention_heads" in shape.config or shape.heads > 1
    if attends and shape.heads % ranks:
        raise SettingError(f"tensor_parallel_size is {ranks}, which does not divide the {shape.heads} attention heads")
    if attends and not keeps_latent(shape) and shape.kv_heads % ranks and ranks % shape.kv_heads:
        raise SettingError(
            f"tensor_parallel_size is {ranks}, neither a divisor nor a multiple of the {shape.kv_heads} key-value heads"
        )
    tokens, rows, length = settings.max_num_batched_tokens or 0, settings.max_num_seqs or 0, settings.max_model_len or 0
    if tokens < rows:
        raise SettingError(f"max_num_batched_tokens is {tokens}, less than max_num_seqs {rows}")
    known = tables()["defaults"]
    multiple = known["cuda_block_multiple_tokens" if settings.device == "cuda" else "cpu_block_multiple_tokens"]
    if settings.device == "cpu" and keeps_latent(shape):
        multiple = known["cpu_latent_block_tokens"]
    if settings.block_size and settings.block_size % multiple and since("block_multiple_since", settings.version):
        raise SettingError(
            f"block_size is {settings.block_size}", hint=f"attention takes multiples of {multiple} tokens"
        )
    if shape.max_positions is not None and length > max(shape.max_positions, shape.default_length or 0):
        raise SettingError(
            f"max_model_len is {length}, the model is for {shape.max_positions}",
            hint="vLLM refuses it unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set",
        )


def _weights(model: Prepared, settings: VllmSettings) -> RankWeights:
    # Without expert parallelism the experts are cut over the same ranks, each of them in parts.
    ranks = settings.tensor_parallel_size
    further = model.speculation is not None and model.speculation.own_layers
    weights = _cut(model, ranks, settings.pipeline_parallel_size, ranks * settings.data_parallel_size, further)
    if settings.cpu_offload_bytes:
        kept = tuple(max(0, size - settings.cpu_offload_bytes) for size in weights.stages_bytes)
        weights = replace(weights, stages_bytes=kept)
    return weights


@functools.lru_cache(maxsize=64)
def _cut(model: Prepared, ranks: int, stages: int, expert_ranks: int, further: bool = False) -> RankWeights:
    """Kept, since a solver plans one model a hundred times under the same ranks."""
    return rank_weights(
        model.parameters, model.shape,
        tensor_parallel_size=ranks, pipeline_parallel_size=stages, expert_ranks=expert_ranks, further_layers=further,
    )  # fmt: skip


def _with_extras(
    model: Prepared, settings: VllmSettings, weights: RankWeights, assumed: list[str]
) -> tuple[RankWeights, tuple[int, ...], tuple[int, ...]]:
    """Weights with the draft's and the adapters', and those two by stage."""
    stages, ranks = len(weights.stages_bytes), settings.tensor_parallel_size
    drafts, adapters = (0,) * stages, (0,) * stages
    if model.draft is not None:
        drafts = (*drafts[:-1], _cut(model.draft, ranks, 1, ranks).fullest_bytes)
        assumed += [f"draft: {line}" for line in model.draft.assumptions]
    if settings.enable_lora:
        adapters = adapter_bytes(
            model.parameters, model.shape.layers, stages, slots=settings.max_loras, rank=settings.max_lora_rank,
            tensor_parallel_size=ranks, element_bytes=model.shape.dtype_bytes,
        )  # fmt: skip
        assumed.append(
            f"LoRA: {settings.max_loras} slots of rank {settings.max_lora_rank} on every matrix of the layers"
        )
    held = tuple(map(sum, zip(weights.stages_bytes, drafts, adapters, strict=True)))
    return replace(weights, stages_bytes=held), drafts, adapters


def _draft_caches(model: Prepared, settings: VllmSettings) -> tuple[LayerCache, ...]:
    """The draft's layers, numbered behind the target's; of the target's own further layers one for each."""
    if model.speculation is None:
        return ()
    first = model.shape.layers
    if model.draft is not None:
        return tuple(replace(cache, index=first + cache.index) for cache in _caches(model.draft.shape, settings))
    if not model.speculation.own_layers:
        return ()
    number = model.shape.number("num_nextn_predict_layers") or 1
    like = next((c for c in reversed(_caches(model.shape, settings)) if c.kind == "full"), None)
    return () if like is None else tuple(replace(like, index=first + i) for i in range(number))


def _layers_of_stages(
    settings: VllmSettings, shape: ModelShape, caches: tuple[LayerCache, ...]
) -> tuple[frozenset[int], ...]:
    """The layers of each stage; the draft's stand on the last."""
    parts = [frozenset(part) for part in stage_layers(shape.layers, settings.pipeline_parallel_size)]
    return (*parts[:-1], parts[-1] | {cache.index for cache in caches if cache.index >= shape.layers})


def _caches(shape: ModelShape, settings: VllmSettings) -> tuple[LayerCache, ...]:
    if settings.kv_cache_dtype == "auto":
        element: float = 1.0 if quantizes_cache(shape) else shape.dtype_bytes
    elif settings.kv_cache_dtype in KV_ELEMENT_BYTES:
        element = KV_ELEMENT_BYTES[settings.kv_cache_dtype]
    else:
        raise SettingError(
            f"kv_cache_dtype is {settings.kv_cache_dtype!r}", hint=f"one of auto, {', '.join(KV_ELEMENT_BYTES)}"
        )
    return layer_caches(
        shape, kv_element_bytes=element, tensor_parallel_size=settings.tensor_parallel_size,
        state_dtype_bytes=_state_bytes(settings),
    )  # fmt: skip


def _state_bytes(settings: VllmSettings) -> int | None:
    """Bytes of an element of a recurrent state, None for the model's own; the CPU backend's kernels want float32."""
    if settings.mamba_ssm_cache_dtype != "auto":
        return element_bytes(settings.mamba_ssm_cache_dtype)
    return 4 if settings.device == "cpu" else None


def _kv_settings(model: Prepared, settings: VllmSettings, caches: tuple[LayerCache, ...]) -> KvSettings:
    shape = model.shape
    known = tables()["defaults"]
    latent = keeps_latent(shape)
    block = (
        settings.block_size
        or known[
            "cuda_block_tokens"
            if settings.device == "cuda"
            else "cpu_latent_block_tokens"
            if latent
            else "cpu_block_tokens"
        ]
    )
    cached = settings.enable_prefix_caching
    if cached is None:
        cached = since("hybrid_prefix_caching_since", settings.version)
    if all(cache.kind == "state" for cache in caches):
        cached = False  # vLLM caches no prefixes of a model without attention
    drafted = 0 if model.speculation is None else model.speculation.tokens
    return KvSettings(
        block,
        settings.max_model_len or 0,
        _steps_in_flight(settings, shape) * (settings.max_num_batched_tokens or 0),
        cached,
        drafted,
    )


def _steps_in_flight(settings: VllmSettings, shape: ModelShape) -> int:
    """Steps that are scheduled before the last one is settled, whose tokens a window holds too (config/vllm.py, 0.32).

    One for each pipeline stage; on a device one more, which the first runner cannot have beside a pipeline.
    """
    stages = settings.pipeline_parallel_size
    if not since("steps_in_flight_since", settings.version):
        return 1
    if settings.device == "cpu" or (stages > 1 and model_runner(settings.version, shape) == 1):
        return stages
    return stages + 1


def _left_open(
    settings: VllmSettings, measured: Correction, peak_uncertainty: int, constants: Mapping[str, int]
) -> Iterator[int]:
    """What a measured start leaves open: its figures' rounding, and the priors of parts that it had under other settings."""
    yield measured.uncertainty_bytes
    now = (settings.max_num_seqs, settings.max_num_batched_tokens)
    if measured.max_num_seqs and now != (measured.max_num_seqs, measured.max_num_batched_tokens):
        yield peak_uncertainty
    if measured.max_num_seqs and measured.enforce_eager and not settings.enforce_eager:
        yield constants["graphs_uncertainty"]


def _images(model: Prepared, settings: VllmSettings, assumed: list[str]) -> EncoderProfile | None:
    """What the encoder of images takes while it is profiled, said; None where there is none, or it is switched off."""
    if not model.shape.has_encoder or settings.device == "cpu":
        return None
    if model.encoder is None:
        assumed.append("images, audio and video: what the encoder takes while it is profiled is not counted")
        return None
    found = profile(model.encoder, settings, model.shape.dtype_bytes)
    assumed += [] if found is None else [f"images: {found}; audio and video are not counted"]
    return found


def counts_graphs(settings: VllmSettings, shape: ModelShape) -> bool:
    """Whether this version takes its estimate of the CUDA graphs out of the utilization."""
    runner = model_runner(settings.version, shape)
    counted = bool(constant("cudagraph_accounting", settings.version, runner=runner)["subtracted"])
    return counted and not settings.enforce_eager and settings.device != "cpu"


def _constants(settings: VllmSettings, shape: ModelShape) -> dict[str, int]:
    """The parts that no formula gives, put right by what was measured; ``context`` is all that is not free at the start."""
    found = _priors(settings, shape)
    if settings.correction is not None:
        found["non_torch"] += settings.correction.non_torch_bytes
        found["cudagraphs"] += settings.correction.cudagraph_bytes if found["cudagraphs"] else 0
    if settings.device_free_bytes is not None:
        found["context"] = settings.gpu_total_bytes - settings.device_free_bytes
    return found


def _priors(settings: VllmSettings, shape: ModelShape) -> dict[str, int]:
    if settings.device == "cpu":
        return dict.fromkeys(
            ("cudagraphs", "non_torch", "context", "uncertainty", "graphs_uncertainty", "subtracted"), 0
        )
    version = settings.version
    other = constant(
        "non_torch", version, tensor_ranks=settings.tensor_parallel_size, stages=settings.pipeline_parallel_size
    )
    graphs, context = constant("cudagraphs", version), constant("context", version)
    subtracted = counts_graphs(settings, shape)
    return {
        "cudagraphs": 0 if settings.enforce_eager else graphs["bytes"],
        "subtracted": int(subtracted),
        "non_torch": other["bytes"], "context": context["bytes"],
        "graphs_uncertainty": graphs["uncertainty_bytes"] if subtracted else 0,
        "uncertainty": round(math.hypot(other["uncertainty_bytes"], graphs["uncertainty_bytes"] if subtracted else 0)),
    }  # fmt: skip


def _stages(
    shape: ModelShape, settings: VllmSettings, weights: RankWeights, constants: Mapping[str, int], requested: int, layout: KvLayout,
    layers: Sequence[Collection[int]], images: EncoderProfile | None,
) -> tuple[tuple[Stage, ...], int]:  # fmt: skip
    found, uncertainty = [], 0
    last = settings.pipeline_parallel_size - 1
    for number, held in enumerate(weights.stages_bytes):
        peak = peak_activation(
            shape, settings.version, rows=settings.max_num_seqs or 0, step_tokens=settings.max_num_batched_tokens or 0,
            tensor_parallel_size=settings.tensor_parallel_size, first_stage=number == 0, last_stage=number == last,
        )  # fmt: skip
        if images is not None and number == 0:
            both = max(images.peak_bytes, peak.bytes + images.outputs_bytes)
            decided = images.uncertainty_bytes if both == images.peak_bytes else peak.uncertainty_bytes
            peak = replace(peak, bytes=both, uncertainty_bytes=decided)
        if settings.correction is not None:
            peak = replace(peak, bytes=max(0, peak.bytes + settings.correction.peak_activation_bytes))
        uncertainty = max(uncertainty, peak.uncertainty_bytes)
        pool = (
            requested - held - peak.bytes - constants["non_torch"] - constants["subtracted"] * constants["cudagraphs"]
        )
        pool = pool if settings.kv_cache_memory_bytes is None else settings.kv_cache_memory_bytes
        later = 0 if settings.device == "cpu" else max(0, peak.sampling_bytes - peak.bytes)
        used = (
            held
            + peak.bytes
            + max(0, pool)
            + later
            + sum(constants[name] for name in ("non_torch", "cudagraphs", "context"))
        )
        request, block = layout.request_bytes(stage=layers[number]), layout.block_bytes(layers[number])
        found.append(Stage(number, held, peak.bytes, pool, request, block, later, used))
    return tuple(found), uncertainty


def _bytes_per_token(caches: tuple[LayerCache, ...], layers: Collection[int]) -> int:
    """Of one token in every layer that keeps tokens; sliding and chunked layers keep only their last."""
    return sum(cache.token_bytes for cache in caches if cache.index in layers)


def _reasons(
    settings: VllmSettings, stages: tuple[Stage, ...], requested: int, constants: Mapping[str, int],
    layout: KvLayout, layers: Sequence[Collection[int]],
) -> Iterator[str]:  # fmt: skip
    """Why it does not fit; nothing where it does."""
    total = settings.gpu_total_bytes
    if requested > total - constants["context"]:
        free = format_gib(total - constants["context"])
        has = "an empty GPU has" if settings.device_free_bytes is None else "this one has"
        yield f"the engine wants {format_gib(requested)} free at its start, {has} {free}"
    for stage in stages:
        where = f" on pipeline stage {stage.number}" if len(stages) > 1 else ""
        pool = format_gib(stage.pool_bytes)
        if stage.pool_bytes <= 0:
            yield f"nothing is left for the KV cache{where}: {pool}"
        elif not layout.fits(stage.pool_bytes, stage=layers[stage.number]):
            length, need = settings.max_model_len, format_gib(stage.request_bytes)
            yield f"one request of {length} tokens needs {need} of KV cache{where}, {pool} is there"
        if stage.used_bytes > total:
            yield f"all parts{where} take {format_gib(stage.used_bytes)} of {format_gib(total)}"
