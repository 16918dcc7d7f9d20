"""Weights of a start on each pipeline stage: the model's, those of a draft, and the slots of LoRA adapters."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from oomguard.memory.constants import since
from oomguard.memory.model.families import FAMILIES
from oomguard.memory.model.model import Model
from oomguard.memory.model.quantized import quantization_config
from oomguard.memory.vllm.absorbed_weights import absorbed_bytes
from oomguard.memory.vllm.double_quantization import with_scales_of_version
from oomguard.memory.vllm.encoder_profile import items_per_prompt
from oomguard.memory.vllm.known_gpu import mxfp4_padding, nvfp4_padding
from oomguard.memory.vllm.lora import around_elements, lora_bytes
from oomguard.memory.vllm.sharded_weights import RankWeights, of_encoder, rank_weights, stage_layers
from oomguard.memory.vllm.start import VllmSettings


@dataclass(frozen=True, slots=True)
class StartWeights:
    """Bytes on the ranks of each pipeline stage; ``stages_bytes`` includes the draft's and the LoRA slots'."""

    stages_bytes: tuple[int, ...]
    drafts_bytes: tuple[int, ...]
    lora_bytes: tuple[int, ...]

    def own_bytes(self, stage: int) -> int:
        """Return the model's own bytes on a stage."""
        return self.stages_bytes[stage] - self.drafts_bytes[stage] - self.lora_bytes[stage]


def start_weights(model: Model, settings: VllmSettings, beyond_bytes: int, assumed: list[str]) -> StartWeights:
    """Weigh what a start loads on each stage.

    Args:
        model: the model, with its draft.
        settings: vLLM's settings with all defaults filled in.
        beyond_bytes: what a measured start held on each stage beyond this sum; 0 without one.
        assumed: receives a line for each assumption.
    """
    stages, ranks = settings.pipeline_parallel_size, settings.tensor_parallel_size
    # Without expert parallelism each expert is sharded over the same ranks that share whole experts with it.
    mtp = model.speculation is not None and model.speculation.uses_mtp_layers
    expert_ranks = ranks * settings.data_parallel_size
    padding = _padding(model, settings, 1 if settings.enable_expert_parallel else ranks)
    loaded = with_scales_of_version(_without_towers(model, settings), settings.version, settings.quantization)
    own = sharded(loaded, ranks, stages, expert_ranks, mtp_layers=mtp, padding=padding).stages_bytes
    made = [
        absorbed_bytes(model.shape, settings.version, ranks=ranks, layers=len(part))
        for part in stage_layers(model.shape.layers, stages)
    ]
    kept = tuple(max(0, size - settings.cpu_offload_bytes) + more for size, more in zip(own, made, strict=True))
    drafts = lora = (0,) * stages
    if model.draft is not None:
        drafts = (*drafts[:-1], sharded(model.draft, ranks, 1, ranks).fullest_bytes)
        assumed += [f"draft: {line}" for line in model.draft.assumptions]
    if settings.enable_lora:
        lora = lora_bytes(
            model.parameters,
            model.shape.layers,
            stages,
            slots=settings.max_loras,
            rank=settings.max_lora_rank,
            tensor_parallel_size=ranks,
            element_bytes=model.shape.dtype_bytes,
            around_elements=around_elements(model.shape),
        )
        around = ", the embedding and the head" if around_elements(model.shape) else ""
        slots = f"{settings.max_loras} slots of rank {settings.max_lora_rank}"
        assumed.append(f"LoRA: {slots} on every matrix of the layers{around}")
    held = (sum(parts) + beyond_bytes for parts in zip(kept, drafts, lora, strict=True))
    return StartWeights(tuple(held), drafts, lora)


def _without_towers(model: Model, settings: VllmSettings) -> Model:
    """Return a model as it is loaded: without an encoder that no prompt may have anything for."""
    if model.encoder is None or not since("towers_left_out_since", settings.version):
        return model
    if items_per_prompt(settings.limit_mm_per_prompt, model.encoder) > 0:
        return model
    return _text_part(model)


@functools.lru_cache(maxsize=4)
def _text_part(model: Model) -> Model:
    return replace(model, parameters=tuple(p for p in model.parameters if not of_encoder(p.name)))


@functools.lru_cache(maxsize=64)
def sharded(
    model: Model, ranks: int, stages: int, expert_ranks: int, *, mtp_layers: bool = False, padding: float = 1.0
) -> RankWeights:
    """Return ``rank_weights`` of a model, cached: a solver budgets one model a hundred times under the same ranks."""
    return rank_weights(
        model.parameters,
        model.shape,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        expert_ranks=expert_ranks,
        mtp_layers=mtp_layers,
        expert_padding=padding,
    )


def _padding(model: Model, settings: VllmSettings, ranks_of_an_expert: int) -> float:
    """Return by which factor the experts of a checkpoint of four bits grow when they are loaded; 1 for all others."""
    config = quantization_config(model.shape) or {}
    width = model.shape.number("moe_intermediate_size") or model.shape.number("intermediate_size")
    if not width:
        return 1.0
    own = -(-width // ranks_of_an_expert)
    if config.get("quant_method") == "mxfp4":
        return mxfp4_padding(settings, model.shape.hidden, own)
    ungated = model.shape.model_type in FAMILIES["types"]["ungated_experts"]
    return nvfp4_padding(settings, own) if ungated and config.get("quant_algo") == "NVFP4" else 1.0
