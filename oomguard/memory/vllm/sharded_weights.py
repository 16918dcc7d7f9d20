"""Weights that one rank holds: a model's parameters sharded by tensor and pipeline parallelism as vLLM shards them.

Sources, vLLM 0.33: model_executor/layers/linear.py (which layers are sharded), vocab_parallel_embedding.py (padding to 64 rows),
distributed/utils.py get_pp_indices (layers of a stage).
benchmarks/plan_h100.py holds them against the figures that vLLM 0.19 logged on an H100.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.memory.model.headers import Parameter
from oomguard.memory.model.layer_kinds import GEMMA4, layer_kinds
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.rotary_tables import rotary_bytes

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings|embedding)(?:\.weight)?$"
)
_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)(?:\.weight)?$")
_KEYS_VALUES: Final = re.compile(r"\.(?:k_proj|v_proj|key|value)\.(?!.*norm)")
_QUERIES: Final = re.compile(r"\.q_proj\.")
_KEYS: Final = re.compile(r"self_attn\.k_proj\.")
_FUSED_ATTENTION: Final = re.compile(r"\.(?:qkv_proj|query_key_value|c_attn|Wqkv)\.")
# MTP layers under names of their own; other families number them behind the last layer.
_MTP: Final = re.compile(r"(?:^|\.)mtp[._]")
_OF_ALL_EXPERTS: Final = 3
# Replicated: each rank holds the whole. The latent projections of MLA are shared by all heads, and so are what compresses keys and the
# indexer that chooses them (Indexer in vllm/model_executor/models/deepseek_v2.py, models/deepseek_v4/attention.py of 0.25).
_REPLICATED: Final = re.compile(
    r"(?:\.gate|\.router|\.router\.\w+|\.shared_expert_gate|\.q_a_proj|\.kv_a_proj_with_mqa|\.kv_a_proj|\.fused_qkv_a_proj|(?:^|\.)mlp1\.\d"
    r"|\.indexer\.\w+|\.compressor\.[\w.]+)\.(?:weight|bias)$"
)
_NOT_LOADED: Final = re.compile(r"rotary_emb\.inv_freq$")
_VOCAB_PADDING_ROWS: Final = 64
_FUSED_QKV: Final = re.compile(r"\.(?:q_proj|k_proj|v_proj)\.")
_FUSED_MLP: Final = re.compile(r"\.(?:gate_proj|up_proj)\.")
_LARGE_BYTES, _ROUND_BYTES, _SPLIT_OFF_BYTES = 10 << 20, 2 << 20, 1 << 20
_SAME_RATIO: Final = 0.99


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Bytes on one rank of each pipeline stage; ``tables_bytes`` of them are tables of positions, no parameters."""

    stages_bytes: tuple[int, ...]
    tables_bytes: int

    @property
    def fullest_bytes(self) -> int:
        """Bytes on a rank of the stage that holds most."""
        return max(self.stages_bytes)


@functools.lru_cache(maxsize=64)
def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage; those left over go to the stages before the last (get_pp_indices)."""
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
    """Return what one rank of each stage holds.

    Args:
        parameters: the model's parameters, with the bytes they take once loaded.
        shape: the model's numbers.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages that share the layers.
        expert_ranks: ranks that the experts are spread over; the tensor ranks if None.
        mtp_layers: whether to count the MTP layers too, which stand on the last stage.
        expert_padding: by which factor the experts grow when they are loaded.
    """
    stages = stage_layers(shape.layers, pipeline_parallel_size)
    totals = [0.0] * pipeline_parallel_size
    plain: dict[tuple[int, str], float] = {}
    has_head, embeddings, growing = False, 0.0, _growing(shape)
    tied = bool(shape.config.get("tie_word_embeddings") or shape.outer.get("tie_word_embeddings"))
    for parameter in parameters:
        layer = _LAYER.search(parameter.name)
        mtp = bool(_MTP.search(parameter.name)) or (layer is not None and _behind_the_last(layer, parameter, shape))
        if _NOT_LOADED.search(parameter.name) or (mtp and not mtp_layers):
            continue
        if tied and _HEAD.search(parameter.name):
            continue  # some files hold a copy of the embedding as the head; the engine drops it
        share = parameter.bytes / _ranks_of(
            parameter, shape, tensor_parallel_size, expert_ranks or tensor_parallel_size
        )
        share *= _grown(parameter, growing, expert_padding)
        if mtp:
            stage = pipeline_parallel_size - 1
        elif layer and not of_encoder(parameter.name):
            stage = next(i for i, part in enumerate(stages) if int(layer.group(1)) in part)
        elif _EMBEDDING.search(parameter.name):
            stage, share = 0, _padded(parameter, share)
            embeddings += share
        elif _HEAD.search(parameter.name):
            stage, share, has_head = pipeline_parallel_size - 1, _padded(parameter, share), True
        else:
            stage = pipeline_parallel_size - 1 if "norm" in parameter.name or "ln_f" in parameter.name else 0
        totals[stage] += share
        if parameter.bytes == parameter.elements * shape.dtype_bytes:
            tensor = (stage, fused_name(parameter.name))
            plain[tensor] = plain.get(tensor, 0) + share
    for (stage, _), size in plain.items():
        totals[stage] += unsplit_bytes(round(size))
    if not has_head and pipeline_parallel_size > 1:
        totals[-1] += embeddings  # tied: the last stage holds a copy as its head
    tables = rotary_bytes(shape)
    return RankWeights(tuple(round(total) + tables for total in totals), tables)


def fused_name(name: str) -> str:
    """Return the name of the tensor that a parameter is part of once it is loaded: projections of one input are one tensor."""
    return _FUSED_MLP.sub(".gate_up_proj.", _FUSED_QKV.sub(".qkv_proj.", name))


def unsplit_bytes(size_bytes: int) -> int:
    """Return what torch's caching allocator gives a large tensor beyond its size: a remainder of 1 MiB and less is not split off.

    Source: c10/cuda/CUDACachingAllocator.cpp, should_split; memory/generate/caching_allocator.py replays all of its rules.
    """
    if size_bytes < _LARGE_BYTES:
        return 0
    remainder = -size_bytes % _ROUND_BYTES
    return remainder if remainder <= _SPLIT_OFF_BYTES else 0


def stage_of(name: str, layers: int, stages: int) -> int:
    """Return the stage of a layer's parameter; the last one for MTP layers."""
    found = _LAYER.search(name)
    number = int(found.group(1)) if found else 0
    parts = stage_layers(layers, stages)
    return next((i for i, part in enumerate(parts) if number in part), stages - 1)


def _behind_the_last(layer: re.Match[str], parameter: Parameter, shape: ModelShape) -> bool:
    return int(layer.group(1)) >= shape.layers and not of_encoder(parameter.name)


def of_encoder(name: str) -> bool:
    """Whether a numbered layer belongs to an encoder of images or audio, not to the language model."""
    return any(part in name for part in ("vision", "visual", "audio", "encoder.", "multi_modal", "mm_projector"))


def _ranks_of(parameter: Parameter, shape: ModelShape, ranks: int, expert_ranks: int) -> float:
    """Return by which factor a rank's part of a parameter is smaller than the whole."""
    of_all = (
        len(parameter.shape) == _OF_ALL_EXPERTS and bool(_LAYER.search(parameter.name)) and "conv" not in parameter.name
    )
    if (of_all or parameter.of_experts) and "shared" not in parameter.name:
        return expert_ranks
    if len(parameter.shape) < 2 or _REPLICATED.search(parameter.name):
        return 1
    if of_encoder(parameter.name) and ".attn." in parameter.name and _encoder_heads(shape) % ranks:
        return 1  # heads that the ranks do not divide: each has the whole attention (vllm/model_executor/models/intern_vit.py)
    heads = min(ranks, shape.kv_heads)
    if _KEYS_VALUES.search(parameter.name):
        return heads
    if _FUSED_ATTENTION.search(parameter.name):
        kv, all_heads = 2 * shape.kv_heads, shape.heads + 2 * shape.kv_heads
        return all_heads / (shape.heads / ranks + kv / heads)
    return ranks


def _growing(shape: ModelShape) -> Mapping[int, tuple[re.Pattern[str], float]]:
    """Return by which factor a projection of each of these layers grows when it is loaded, for Gemma 4.

    Keys that stand for the values are loaded as both. Layers that share the keys and values of another have room for their own all the
    same, beside their queries. Source: _weight_iterator and Gemma4Attention in vllm/model_executor/models/gemma4.py, 0.20 to 0.27.
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


def _grown(parameter: Parameter, growing: Mapping[int, tuple[re.Pattern[str], float]], expert_padding: float) -> float:
    """Return by which factor a parameter grows when it is loaded."""
    layer = _LAYER.search(parameter.name)
    projection, factor = growing.get(int(layer.group(1)), (None, 1.0)) if layer else (None, 1.0)
    if projection is not None and projection.search(parameter.name) and not of_encoder(parameter.name):
        return factor
    return expert_padding if parameter.of_experts else 1


def _encoder_heads(shape: ModelShape) -> int:
    vision = shape.outer.get("vision_config")
    heads = vision.get("num_attention_heads") if isinstance(vision, Mapping) else None
    return heads if isinstance(heads, int) else 0


def _padded(parameter: Parameter, share: float) -> float:
    """Return a rank's share with the vocabulary padded to a multiple of 64 rows, as vLLM pads it before it shards it."""
    rows = max(parameter.shape, default=1)
    return share * (-(-rows // _VOCAB_PADDING_ROWS) * _VOCAB_PADDING_ROWS / rows)


def first_of_fullest(stages_bytes: Sequence[int]) -> int:
    """Return the first of the stages that hold most: vLLM logs its first rank's figures, and a norm makes no difference."""
    most = max(stages_bytes)
    return next(i for i, size in enumerate(stages_bytes) if size >= _SAME_RATIO * most)
