"""Compute a start's weights per pipeline stage: the model's, a draft's, and LoRA slots."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from oomguard.core.files import read_tables
from oomguard.estimate.constants import rows_of, since
from oomguard.estimate.model.files import Parameter
from oomguard.estimate.model.layer_caches import GEMMA4, keeps_latent, layer_kinds
from oomguard.estimate.model.model import Model
from oomguard.estimate.model.quantization import quantization_config
from oomguard.estimate.model.shape import (
    FAMILIES,
    MAX_COUNT,
    ModelShape,
    rope_factor,
    rope_kind,
    rope_scaling,
)
from oomguard.estimate.start.start import VllmSettings, mxfp4_padding, nvfp4_padding

# After loading, the engine converts latent attention's weights: it multiplies two matrices, or
# unpacks one.
#
# Source: process_weights_after_loading in vllm/attention/backends/mla/utils.py, 0.7.3 (0.7.1 to
# 0.7). Later versions multiply at run time and store an FP8 checkpoint's key-value projection in
# half precision as well. A is a query's inputs, N the heads on a rank, C the latent vector, R the
# rotary dimensions, and H the outputs. A layer then has ``A * N * C`` and ``N * C * H`` elements,
# one byte each for an FP8 checkpoint. In half precision it has ``A * N * R``, and for a quantized
# checkpoint the whole key-value projection.


def absorbed_bytes(shape: ModelShape, version: Version, *, ranks: int, layers: int) -> int:
    """Return the bytes of the converted layers on one rank, or 0 for other models and versions.

    Args:
        shape: the model's numbers.
        version: vLLM's version.
        ranks: the number of ranks that share each layer's heads.
        layers: layers on the rank.
    """
    latent = shape.number("kv_lora_rank")
    rule = next(iter(rows_of("absorbed_weights", version)), None)
    if not latent or not keeps_latent(shape) or rule is None:
        return 0
    config = quantization_config(shape)
    is_fp8 = config is not None and config.get("quant_method") == "fp8"
    heads = -(-shape.heads // ranks)
    query = shape.number("q_lora_rank") or shape.hidden
    rotary = shape.number("qk_rope_head_dim") or 0
    plain = shape.number("qk_nope_head_dim") or 0
    value = shape.number("v_head_dim") or 0
    unpacked = heads * latent * (plain + value) * shape.dtype_bytes
    if not rule["products"]:
        if is_fp8:
            return layers * unpacked
        return 0
    if is_fp8:
        element = 1
    else:
        element = shape.dtype_bytes
    products = heads * latent * (query + shape.hidden) * element
    copies = heads * query * rotary * shape.dtype_bytes + (unpacked if config is not None else 0)
    return layers * (products + copies)


# Versions differ in bitsandbytes' scales: quantized again, or unpacked while loading.
#
# A checkpoint may have scales in eight bits, and the engine itself makes such ones from half
# precision. From 0.9 on it unpacks both. Sources: quantize_4bit in
# vllm/model_executor/model_loader/loader.py of 0.7.3 to 0.8.5, _dequantize_dq in
# bitsandbytes_loader.py of 0.9.2.

# Bits per element, with a scale per 64 of four bytes, or of one byte and a share of another.
_PLAIN_BITS = 4 + 32 / 64
_DOUBLE_BITS = 4 + 8 / 64 + 32 / (64 * 256)
_METHOD: Final = "bitsandbytes"


def with_scales_of_version(model: Model, version: Version, quantization: str | None) -> Model:
    """Return a bitsandbytes model with the version's weight bytes; other models unchanged."""
    config = quantization_config(model.shape) or {}
    if _METHOD not in (config.get("quant_method"), quantization) or config.get("load_in_8bit"):
        return model
    read_double = bool(config.get("bnb_4bit_use_double_quant"))
    holds_double = (read_double or not config) and not since("scales_unpacked_since", version)
    if read_double == holds_double:
        return model
    return _changed(model, holds_double)


@functools.lru_cache(maxsize=4)
def _changed(model: Model, holds_double: bool) -> Model:
    old, new = (_PLAIN_BITS, _DOUBLE_BITS) if holds_double else (_DOUBLE_BITS, _PLAIN_BITS)
    parameters = []
    for p in model.parameters:
        if p.bytes == round(p.elements * old / 8):
            parameters.append(replace(p, bytes=round(p.elements * new / 8)))
        else:
            parameters.append(p)
    return replace(model, parameters=tuple(parameters))


# A start makes tables of cosines and sines: one for all layers with the same positions, whole on
# each rank.
#
# Sources: get_rope in vllm/model_executor/layers/rotary_embedding of 0.7.3 to 0.27.1, and
# Gemma4Attention in models/gemma4.py of 0.27.1.

# For positions in time, height and width the table spans four times the length (MRotaryEmbedding,
# cache_max_position_num).
_LENGTHS_OF_SECTIONS: Final = 4
# "Proportional" positions rotate a share of each head's elements, but the table has all of them
# (gemma4_rope.py).
_OF_WHOLE_HEADS: Final = "proportional"
# Linear scaling has a table of the scaled length (linear_scaling_rope.py). That also applies if the
# file already has that length as the model's own (Gemma 3): the table then spans eight times the
# length.
_STRETCHED: Final = "linear"


def rotary_bytes(shape: ModelShape) -> int:
    """Return the bytes of all position tables of a model."""
    if shape.model_type in FAMILIES["types"]["without_rotary"] or shape.max_positions is None:
        return 0
    by_kind = []
    for rope in rope_scaling(shape.config).values():
        if isinstance(rope, Mapping):
            by_kind.append(rope)
    if by_kind:
        kinds = rope_scaling(shape.config).items()
        return (
            sum(_rows(shape, rope) * _columns(shape, kind, rope) for kind, rope in kinds)
            * shape.dtype_bytes
        )
    columns = shape.number("qk_rope_head_dim") or round(
        shape.head_dim * _rotary_share(shape.config)
    )
    if shape.config.get("rope_local_base_freq"):
        local = shape.max_positions
    else:
        local = 0
    if _in_sections(shape):
        lengths = _LENGTHS_OF_SECTIONS
    else:
        lengths = 1
    return (lengths * _table_positions(shape) + local) * columns * shape.dtype_bytes


def _rows(shape: ModelShape, rope: Any) -> int:
    """Return the rows of the table for one kind of layers with its own positions."""
    stretched = isinstance(rope, Mapping) and rope.get("rope_type") == _STRETCHED
    return round(
        (shape.max_positions or 0) * (rope_factor({"rope_parameters": rope}) if stretched else 1.0)
    )


def _columns(shape: ModelShape, kind: str, rope: Any) -> int:
    """Return the columns of the table for one kind of layers with its own positions."""
    if not isinstance(rope, Mapping):
        return 0
    if shape.model_type.startswith(GEMMA4) and kind.startswith("full"):
        wide = shape.number("global_head_dim")
    else:
        wide = None
    share = 1.0 if rope.get("rope_type") == _OF_WHOLE_HEADS else _share_of(rope)
    return round((wide or shape.head_dim) * (share or 1.0))


def _in_sections(shape: ModelShape) -> bool:
    """Return whether positions have sections for time, height and width."""
    kinds = tuple(FAMILIES["types"]["rotary_encoders"])
    return "mrope_section" in rope_scaling(shape.config) or str(
        shape.outer.get("model_type")
    ).startswith(kinds)


def _rotary_share(config: Mapping[str, Any]) -> float:
    return _share_of(config) or _share_of(rope_scaling(config)) or 1.0


def _share_of(part: Mapping[str, Any]) -> float | None:
    """Return the share of a head's elements that rotate, or None if the file does not say."""
    for name in ("partial_rotary_factor", "rotary_pct", "rotary_percent"):
        value = part.get(name)
        if isinstance(value, (int, float)) and 0 < value <= 1:
            return float(value)
    return None


def _table_positions(shape: ModelShape) -> int:
    """Count the rows of a position table.

    YaRN and linear scaling use the scaled length, LongRoPE a short and a long table.
    """
    positions = shape.max_positions or 0
    original = rope_scaling(shape.config).get("original_max_position_embeddings")
    if isinstance(original, int) and 0 < original <= MAX_COUNT:
        known = original
    else:
        known = None
    kind = rope_kind(shape.config)
    if kind in {"yarn", "deepseek_yarn"} and known:
        return max(1, round(known * rope_factor(shape.config)))
    if kind == _STRETCHED:
        return round(
            (shape.number("max_position_embeddings") or positions) * rope_factor(shape.config)
        )
    if kind == "longrope":
        return positions + (shape.default_length or 0)
    return positions


# vLLM shards a model's parameters by tensor and pipeline parallelism.
#
# Sources, vLLM 0.33: model_executor/layers/linear.py (which layers are sharded),
# vocab_parallel_embedding.py (padding to 64 rows), distributed/utils.py get_pp_indices (layers of a
# stage). benchmarks/plan_h100.py compares the result with vLLM 0.19's logs on an H100.

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings|embedding)(?:\.weight)?$"
)
_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)(?:\.weight)?$")
_KEYS_VALUES: Final = re.compile(r"\.(?:k_proj|v_proj|key|value)\.(?!.*norm)")
_QUERIES: Final = re.compile(r"\.q_proj\.")
_KEYS: Final = re.compile(r"self_attn\.k_proj\.")
_FUSED_ATTENTION: Final = re.compile(r"\.(?:qkv_proj|query_key_value|c_attn|Wqkv)\.")
# MTP layers with their own names; other families number them after the last layer.
_MTP: Final = re.compile(r"(?:^|\.)mtp[._]")
_OF_ALL_EXPERTS: Final = 3
# Each rank has a full copy. All heads share MLA's latent projections, the compression of keys, and
# the indexer that selects them (Indexer in vllm/model_executor/models/deepseek_v2.py,
# models/deepseek_v4/attention.py of 0.25).
_REPLICATED: Final = re.compile(
    r"(?:\.gate|\.router|\.router\.\w+|\.shared_expert_gate|\.q_a_proj|\.kv_a_proj_with_mqa|\.kv_a_proj|\.fused_qkv_a_proj|(?:^|\.)mlp1\.\d"
    r"|\.indexer\.\w+|\.compressor\.[\w.]+)\.(?:weight|bias)$"
)
_NOT_LOADED: Final = re.compile(r"rotary_emb\.inv_freq$")
_VOCAB_PADDING_ROWS: Final = 64
_FUSED_QKV: Final = re.compile(r"\.(?:q_proj|k_proj|v_proj)\.")
_FUSED_MLP: Final = re.compile(r"\.(?:gate_proj|up_proj)\.")
_LARGE_BYTES = 10 << 20
_ROUND_BYTES = 2 << 20
_SPLIT_OFF_BYTES = 1 << 20
_SAME_RATIO: Final = 0.99


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Report the bytes on one rank of each pipeline stage.

    ``tables_bytes`` of them are position tables, not parameters.
    """

    stages_bytes: tuple[int, ...]
    tables_bytes: int

    @property
    def fullest_bytes(self) -> int:
        """Return the bytes on a rank of the fullest stage."""
        return max(self.stages_bytes)


@functools.lru_cache(maxsize=64)
def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage.

    The stages before the last get the remainder (get_pp_indices).
    """
    counts = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        counts[-i] += 1
    starts = [sum(counts[:i]) for i in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def rank_weights(
    parameters: Iterable[Parameter],
    shape: ModelShape,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_ranks: int | None = None,
    mtp_layers: bool = False,
    expert_padding: float = 1.0,
) -> RankWeights:
    """Return the bytes on one rank of each stage.

    Args:
        parameters: the model's parameters with their bytes after loading.
        shape: the model's numbers.
        tensor_parallel_size: the number of ranks that share each layer.
        pipeline_parallel_size: the number of stages that share the layers.
        expert_ranks: the number of ranks that share the experts; None uses the tensor ranks.
        mtp_layers: whether to include the MTP layers, which are on the last stage.
        expert_padding: the growth factor of the experts when loaded.
    """
    stages = stage_layers(shape.layers, pipeline_parallel_size)
    totals = [0.0] * pipeline_parallel_size
    plain: dict[tuple[int, str], float] = {}
    has_head = False
    embeddings = 0.0
    growing = _growing(shape)
    tied = bool(shape.config.get("tie_word_embeddings") or shape.outer.get("tie_word_embeddings"))
    for parameter in parameters:
        layer = _LAYER.search(parameter.name)
        mtp = bool(_MTP.search(parameter.name)) or (
            layer is not None and _behind_the_last(layer, parameter, shape)
        )
        if _NOT_LOADED.search(parameter.name) or (mtp and not mtp_layers):
            continue
        if tied and _HEAD.search(parameter.name):
            continue  # some files have the embedding again as the head; the engine drops the copy
        share = parameter.bytes / _ranks_of(
            parameter, shape, tensor_parallel_size, expert_ranks or tensor_parallel_size
        )
        share *= _grown(parameter, growing, expert_padding)
        if mtp:
            stage = pipeline_parallel_size - 1
        elif layer and not of_encoder(parameter.name):
            stage = _index_of(int(layer.group(1)), stages)
        elif _EMBEDDING.search(parameter.name):
            stage, share = 0, _padded(parameter, share)
            embeddings += share
        elif _HEAD.search(parameter.name):
            stage, share, has_head = pipeline_parallel_size - 1, _padded(parameter, share), True
        elif "norm" in parameter.name or "ln_f" in parameter.name:
            stage = pipeline_parallel_size - 1
        else:
            stage = 0
        totals[stage] += share
        if parameter.bytes == parameter.elements * shape.dtype_bytes:
            tensor = (stage, fused_name(parameter.name))
            plain[tensor] = plain.get(tensor, 0) + share
    for (stage, _), size in plain.items():
        totals[stage] += unsplit_bytes(round(size))
    if not has_head and pipeline_parallel_size > 1:
        totals[-1] += embeddings  # tied: the last stage has a copy as its head
    tables = rotary_bytes(shape)
    return RankWeights(tuple(round(total) + tables for total in totals), tables)


def fused_name(name: str) -> str:
    """Return the name of the loaded tensor that a parameter becomes part of.

    The engine fuses projections with the same input.
    """
    return _FUSED_MLP.sub(".gate_up_proj.", _FUSED_QKV.sub(".qkv_proj.", name))


def unsplit_bytes(size_bytes: int) -> int:
    """Return the caching allocator's overhead for a large tensor.

    It does not split off a remainder of up to 1 MiB. Source: c10/cuda/CUDACachingAllocator.cpp,
    should_split; estimate/call/allocator.py replays all of its rules.
    """
    if size_bytes < _LARGE_BYTES:
        return 0
    remainder = -size_bytes % _ROUND_BYTES
    if remainder <= _SPLIT_OFF_BYTES:
        return remainder
    return 0


def stage_of(name: str, layers: int, stages: int) -> int:
    """Return the stage of a layer's parameter; the last one for MTP layers."""
    found = _LAYER.search(name)
    if found:
        number = int(found.group(1))
    else:
        number = 0
    return _index_of(number, stage_layers(layers, stages))


def _index_of(layer: int, stages: Sequence[range]) -> int:
    """Return the stage that has a layer, or the last stage for a layer behind them all."""
    for i, part in enumerate(stages):
        if layer in part:
            return i
    return len(stages) - 1


def _behind_the_last(layer: re.Match[str], parameter: Parameter, shape: ModelShape) -> bool:
    return int(layer.group(1)) >= shape.layers and not of_encoder(parameter.name)


_ENCODER_PARTS: Final = ("vision", "visual", "audio", "encoder.", "multi_modal", "mm_projector")


def of_encoder(name: str) -> bool:
    """Return whether a numbered layer belongs to an image or audio encoder."""
    return any(part in name for part in _ENCODER_PARTS)


def _ranks_of(parameter: Parameter, shape: ModelShape, ranks: int, expert_ranks: int) -> float:
    """Return the number of ranks that share a parameter."""
    of_all = (
        len(parameter.shape) == _OF_ALL_EXPERTS
        and bool(_LAYER.search(parameter.name))
        and "conv" not in parameter.name
    )
    if (of_all or parameter.of_experts) and "shared" not in parameter.name:
        return expert_ranks
    if len(parameter.shape) < 2 or _REPLICATED.search(parameter.name):
        return 1
    if of_encoder(parameter.name) and ".attn." in parameter.name and _encoder_heads(shape) % ranks:
        # The ranks do not divide the heads, so each rank has the whole attention. Source:
        # vllm/model_executor/models/intern_vit.py.
        return 1
    heads = min(ranks, shape.kv_heads)
    if _KEYS_VALUES.search(parameter.name):
        return heads
    if _FUSED_ATTENTION.search(parameter.name):
        kv = 2 * shape.kv_heads
        all_heads = shape.heads + 2 * shape.kv_heads
        return all_heads / (shape.heads / ranks + kv / heads)
    return ranks


def _growing(shape: ModelShape) -> Mapping[int, tuple[re.Pattern[str], float]]:
    """Return the growth factors of projections in Gemma 4's layers when loaded.

    Keys that double as values load as both. Layers that reuse another layer's keys and values still
    allocate their own next to their queries. Source: _weight_iterator and Gemma4Attention in
    vllm/model_executor/models/gemma4.py, 0.20 to 0.27.
    """
    if not shape.model_type.startswith(GEMMA4):
        return {}
    found: dict[int, tuple[re.Pattern[str], float]] = {}
    for number, kind in enumerate(layer_kinds(shape)):
        if kind == "full" and shape.config.get("attention_k_eq_v"):
            found[number] = (_KEYS, 2.0)
        elif kind == "none":
            found[number] = (_QUERIES, 1 + 2 * shape.kv_heads / shape.heads)
    return found


def _grown(
    parameter: Parameter,
    growing: Mapping[int, tuple[re.Pattern[str], float]],
    expert_padding: float,
) -> float:
    """Return the growth factor of a parameter when loaded."""
    layer = _LAYER.search(parameter.name)
    projection, factor = growing.get(int(layer.group(1)), (None, 1.0)) if layer else (None, 1.0)
    if (
        projection is not None
        and projection.search(parameter.name)
        and not of_encoder(parameter.name)
    ):
        return factor
    if parameter.of_experts:
        return expert_padding
    return 1


def _encoder_heads(shape: ModelShape) -> int:
    vision = shape.outer.get("vision_config")
    if isinstance(vision, Mapping):
        heads = vision.get("num_attention_heads")
    else:
        heads = None
    if isinstance(heads, int):
        return heads
    return 0


def _padded(parameter: Parameter, share: float) -> float:
    """Return a rank's share with the vocabulary padded to a multiple of 64 rows.

    vLLM pads it before sharding.
    """
    rows = max(parameter.shape, default=1)
    return share * (-(-rows // _VOCAB_PADDING_ROWS) * _VOCAB_PADDING_ROWS / rows)


def first_of_fullest(stages_bytes: Sequence[int]) -> int:
    """Return the first of the fullest stages.

    vLLM logs its first rank's numbers, and a norm makes no difference.
    """
    most = max(stages_bytes)
    full = [size >= _SAME_RATIO * most for size in stages_bytes]
    return full.index(True)


# LoRA reserves the slots of all adapters before the first one loads.
#
# Each matrix has one slot per adapter: A of rank by its inputs, B of its outputs by rank. If the
# matrix is sharded by outputs, A is replicated; if by inputs, B is
# (vllm/lora/layers/column_parallel_linear.py and row_parallel_linear.py, 0.32, not fully sharded).
# The families of lora_around.toml also adapt the embedding: A of vocabulary by rank and B of width
# by rank. The output head has the same, whole on every rank (vocab_parallel_embedding.py,
# logits_processor.py).

_FILE: Final = Path(__file__).with_name("lora_around.toml")
_LINEAR: Final = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")
_SKIPPED: Final = re.compile(r"norm|\.gate\.weight$|\.router\b|conv1d|A_log|\.D$|embed")
_ROWS: Final = re.compile(r"\.(?:o_proj|down_proj|out_proj|dense|c_proj|fc2|w2|dense_4h_to_h)\b")
_MATRIX = 2
_EXPERTS = 3


def lora_bytes(
    parameters: Iterable[Parameter],
    layers: int,
    stages: int,
    *,
    slots: int,
    rank: int,
    tensor_parallel_size: int,
    element_bytes: int,
    around_elements: int = 0,
) -> tuple[int, ...]:
    """Return the LoRA bytes on one rank of each pipeline stage.

    Args:
        parameters: the model's parameters.
        layers: the number of its layers.
        stages: the number of pipeline stages.
        slots: adapters at once.
        rank: the largest rank of an adapter.
        tensor_parallel_size: the number of ranks that share each layer.
        element_bytes: bytes per element of the adapters.
        around_elements: elements per rank of the embedding's and of the head's adapter; see the
            function ``around_elements``.
    """
    totals = [0.0] * stages
    for end in (0, -1):  # the embedding is on the first stage, the head on the last
        totals[end] += slots * rank * around_elements * element_bytes
    for parameter in parameters:
        if (
            not _LINEAR.search(parameter.name)
            or _SKIPPED.search(parameter.name)
            or len(parameter.shape) < _MATRIX
        ):
            continue
        if len(parameter.shape) == _EXPERTS:
            experts = parameter.shape[0]
        else:
            experts = 1
        outputs, inputs = parameter.shape[-2:]
        if _ROWS.search(parameter.name):
            elements = rank * inputs / tensor_parallel_size + rank * outputs
        else:
            elements = rank * inputs + rank * outputs / tensor_parallel_size
        totals[stage_of(parameter.name, layers, stages)] += (
            slots * experts * elements * element_bytes
        )
    return tuple(round(total) for total in totals)


def around_elements(shape: ModelShape) -> int:
    """Return the elements per rank of an adapter for the embedding or the head.

    Returns 0 if vLLM adapts neither.
    """
    if shape.model_type in _adapted_around():
        return shape.vocab + shape.hidden
    return 0


@cache
def _adapted_around() -> frozenset[str]:
    return frozenset(next(iter(read_tables("lora_around", [_FILE]).values()))["model_types"])


@dataclass(frozen=True, slots=True)
class StartWeights:
    """Report the bytes on each pipeline stage's ranks, including the draft and LoRA slots."""

    stages_bytes: tuple[int, ...]
    drafts_bytes: tuple[int, ...]
    lora_bytes: tuple[int, ...]

    def own_bytes(self, stage: int) -> int:
        """Return the model's own bytes on a stage."""
        return self.stages_bytes[stage] - self.drafts_bytes[stage] - self.lora_bytes[stage]


def start_weights(
    model: Model, settings: VllmSettings, beyond_bytes: int, assumed: list[str]
) -> StartWeights:
    """Compute the weights that a start loads on each stage.

    Args:
        model: the model with its draft.
        settings: vLLM's settings with all defaults filled in.
        beyond_bytes: a measured start's additional bytes on each stage; 0 without one.
        assumed: receives a line for each assumption.
    """
    stages = settings.pipeline_parallel_size
    ranks = settings.tensor_parallel_size
    # Without expert parallelism, the ranks that would share whole experts share each expert's
    # shards.
    mtp = model.speculation is not None and model.speculation.uses_mtp_layers
    expert_ranks = ranks * settings.data_parallel_size
    padding = _padding(model, settings, 1 if settings.enable_expert_parallel else ranks)
    loaded = with_scales_of_version(
        _without_towers(model, settings), settings.version, settings.quantization
    )
    own = sharded(loaded, ranks, stages, expert_ranks, mtp_layers=mtp, padding=padding).stages_bytes
    made = []
    for part in stage_layers(model.shape.layers, stages):
        made.append(absorbed_bytes(model.shape, settings.version, ranks=ranks, layers=len(part)))
    # vLLM offloads only weights that it loads; the layers that it converts later stay.
    kept = []
    for size, more in zip(own, made, strict=True):
        kept.append(max(0, size - settings.cpu_offload_bytes) + more)
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
        if around_elements(model.shape):
            around = ", the embedding and the head"
        else:
            around = ""
        slots = f"{settings.max_loras} slots of rank {settings.max_lora_rank}"
        assumed.append(f"LoRA: {slots} on every matrix of the layers{around}")
    held = (sum(parts) + beyond_bytes for parts in zip(kept, drafts, lora, strict=True))
    return StartWeights(tuple(held), drafts, lora)


def _without_towers(model: Model, settings: VllmSettings) -> Model:
    """Return the loaded part of a model, without an encoder that no prompt may use."""
    if model.encoder is None or not since("towers_left_out_since", settings.version):
        return model
    from oomguard.estimate.start.encoder_profile import items_per_prompt

    if items_per_prompt(settings.limit_mm_per_prompt, model.encoder) > 0:
        return model
    return _text_part(model)


@functools.lru_cache(maxsize=4)
def _text_part(model: Model) -> Model:
    parameters = []
    for p in model.parameters:
        if not of_encoder(p.name):
            parameters.append(p)
    return replace(model, parameters=tuple(parameters))


@functools.lru_cache(maxsize=64)
def sharded(
    model: Model,
    ranks: int,
    stages: int,
    expert_ranks: int,
    *,
    mtp_layers: bool = False,
    padding: float = 1.0,
) -> RankWeights:
    """Return ``rank_weights`` of a model, cached for the solver's many calls."""
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
    """Return the growth factor of a four-bit checkpoint's experts when loaded; 1 for others."""
    config = quantization_config(model.shape) or {}
    width = model.shape.number("moe_intermediate_size") or model.shape.number("intermediate_size")
    if not width:
        return 1.0
    own = -(-width // ranks_of_an_expert)
    if config.get("quant_method") == "mxfp4":
        return mxfp4_padding(settings, model.shape.hidden, own)
    ungated = model.shape.model_type in FAMILIES["types"]["ungated_experts"]
    if ungated and config.get("quant_algo") == "NVFP4":
        return nvfp4_padding(settings, own)
    return 1.0
