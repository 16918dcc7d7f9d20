"""The KV cache of a start before its pool is known: each layer's cache, the draft's among them, and how vLLM lays them out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from oomguard.errors import SettingError
from oomguard.memory.constants import since, tables
from oomguard.memory.model.layer_caches import LayerCache, layer_caches
from oomguard.memory.model.model import Model, element_bytes
from oomguard.memory.model.quantized import quantizes_cache
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.kv_layout import KvLayout, KvSettings, lay_out
from oomguard.memory.vllm.model_runner import model_runner
from oomguard.memory.vllm.refusals import has_latent_blocks
from oomguard.memory.vllm.sharded_weights import stage_layers
from oomguard.memory.vllm.start import VllmSettings
from oomguard.observe.processor import multiplies_in_bfloat16

KV_ELEMENT_BYTES: Final = {
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 4.0,
}


@dataclass(frozen=True, slots=True)
class StartCaches:
    """The layout of a rank's KV cache, and the numbers of the layers on each pipeline stage; a draft stands on the last."""

    caches: tuple[LayerCache, ...]
    layout: KvLayout
    stages: tuple[frozenset[int], ...]

    def token_bytes(self, layers: Collection[int]) -> int:
        """Return the bytes of one token in ``layers``; sliding and chunked layers keep only the last of them."""
        return sum(c.token_bytes for c in self.caches if c.index in layers and c.kind != "cross")


def start_caches(model: Model, settings: VllmSettings) -> StartCaches:
    """Lay out the KV cache of one rank.

    Raises:
        ConfigError: a number of the model's configuration is absurd.
        SettingError: ``kv_cache_dtype`` or ``mamba_ssm_cache_dtype`` is not known.
    """
    caches = _caches(model.shape, settings) + _draft_caches(model, settings)
    layers = model.shape.layers
    parts = [frozenset(part) for part in stage_layers(layers, settings.pipeline_parallel_size)]
    stages = (*parts[:-1], parts[-1] | {cache.index for cache in caches if cache.index >= layers})
    return StartCaches(caches, lay_out(caches, _kv_settings(model, settings, caches)), stages)


def _caches(shape: ModelShape, settings: VllmSettings) -> tuple[LayerCache, ...]:
    if settings.kv_cache_dtype == "auto":
        element: float = 1.0 if quantizes_cache(shape) else shape.dtype_bytes
    elif settings.kv_cache_dtype in KV_ELEMENT_BYTES:
        element = KV_ELEMENT_BYTES[settings.kv_cache_dtype]
    else:
        raise SettingError(
            f"kv_cache_dtype is {settings.kv_cache_dtype!r}", hint=f"one of auto, {', '.join(KV_ELEMENT_BYTES)}"
        )
    found = layer_caches(
        shape,
        kv_element_bytes=element,
        tensor_parallel_size=settings.tensor_parallel_size,
        state_dtype_bytes=_state_bytes(settings),
        latent=since("latent_cache_since", settings.version),
    )
    kept = since("state_checkpoints_since", settings.version)
    return found if kept else tuple(replace(cache, checkpoints=0) for cache in found)


def _state_bytes(settings: VllmSettings) -> int | None:
    """Return the bytes of an element of a recurrent state, None for the model's own.

    The CPU backend takes float32 where its processor multiplies bfloat16 (vllm/platforms/cpu.py, 0.32).
    """
    if settings.mamba_ssm_cache_dtype != "auto":
        return element_bytes(settings.mamba_ssm_cache_dtype)
    return 4 if settings.device == "cpu" and multiplies_in_bfloat16() else None


def _draft_caches(model: Model, settings: VllmSettings) -> tuple[LayerCache, ...]:
    """Return the caches of a draft model or of the target's MTP layers, numbered behind the target's own."""
    if model.speculation is None:
        return ()
    first = model.shape.layers
    if model.draft is not None:
        return tuple(replace(cache, index=first + cache.index) for cache in _caches(model.draft.shape, settings))
    if not model.speculation.uses_mtp_layers:
        return ()
    number = model.shape.number("num_nextn_predict_layers") or 1
    like = next((c for c in reversed(_caches(model.shape, settings)) if c.kind == "full"), None)
    return () if like is None else tuple(replace(like, index=first + i) for i in range(number))


def _kv_settings(model: Model, settings: VllmSettings, caches: tuple[LayerCache, ...]) -> KvSettings:
    cached = settings.enable_prefix_caching
    if cached is None:
        cached = since("hybrid_prefix_caching_since", settings.version)
    if settings.enable_prefix_caching is None and all(cache.kind == "state" for cache in caches):
        cached = False  # of a model without attention vLLM caches prefixes only where it is told to
    return KvSettings(
        settings.block_size or _default_block_tokens(settings, model.shape),
        settings.max_model_len or 0,
        _steps_in_flight(settings, model.shape) * (settings.max_num_batched_tokens or 0),
        cached,
        0 if model.speculation is None else model.speculation.tokens,
        settings.max_num_batched_tokens or 0,
        settings.decode_context_parallel_size,
    )


def _default_block_tokens(settings: VllmSettings, shape: ModelShape) -> int:
    known = tables()["defaults"]
    if settings.device == "cuda":
        return int(known["cuda_block_tokens"])
    return int(known["cpu_latent_block_tokens" if has_latent_blocks(settings, shape) else "cpu_block_tokens"])


def _steps_in_flight(settings: VllmSettings, shape: ModelShape) -> int:
    """Count the steps scheduled before the last one is settled, whose tokens a window holds too (config/vllm.py, 0.32).

    One for each pipeline stage; on a device one more, except for the first runner with a pipeline.
    """
    stages = settings.pipeline_parallel_size
    if not since("steps_in_flight_since", settings.version):
        return 1
    if settings.device == "cpu" or (stages > 1 and model_runner(settings.version, shape) == 1):
        return stages
    return stages + 1
