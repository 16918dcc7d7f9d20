"""Estimate the parts of a start without a formula: CUDA graphs and non-torch memory.

They are priors by version, ranks and links until a start of the model was measured
(calibration.py).

Each graph takes a base and more per layer. NCCL's all-reduces without links add memory if they are
captured; those over links, and vLLM's custom ones between two GPUs, do not. All graphs share one
pool that the largest size determines: its tokens times the hidden size. Experts add memory once,
quantized ones the most. Blackwell GPUs need less, drivers before CUDA 12.4 several times as much.
constants.toml has the sizes by version with their sources, fitted.toml the fitted bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.estimate.constants import constant, rows_of, since, tables
from oomguard.estimate.model.layer_caches import keeps_latent
from oomguard.estimate.model.model import read_speculation
from oomguard.estimate.model.quantization import is_nvfp4, quantization_config, quantizes_cache
from oomguard.estimate.model.shape import FAMILIES, ModelShape, encoder_decoder
from oomguard.estimate.start.activations import compressed, has_indexer, model_runner
from oomguard.estimate.start.start import (
    UNLINKED_RANKS,
    VllmSettings,
    architecture_of,
    fused_allreduce_bytes,
    has_custom_allreduce,
    has_nvlink,
    is_hopper_or_later,
    is_rocm,
)

# vLLM's first engine compiles no step and captures one graph per number of requests.
#
# Some versions contain both engines, and settings or the GPU decide. Source:
# _is_v1_supported_oracle in vllm/engine/arg_utils.py of 0.8.2 to 0.10.2. A plan ignores the
# conditions that it does not know (load formats, a background thread).

# For a version with both engines, the first engine uses the tables of this version.
LAST_OF_FIRST: Final = Version("0.7.3")


def by_engine(settings: VllmSettings) -> Version:
    """Return the version whose rules apply: the start's own, or the first engine's last one."""
    if is_first_engine(settings) and since("compiled_since", settings.version):
        return LAST_OF_FIRST
    return settings.version


def is_first_engine(settings: VllmSettings) -> bool:
    """Return whether a start uses vLLM's first engine."""
    if not since("compiled_since", settings.version):
        return True
    row = next(iter(rows_of("first_engine", settings.version)), None)
    if row is None or settings.device == "cpu":
        return False
    old = architecture_of(settings) in row["architectures"]
    stages = settings.pipeline_parallel_size > 1 and row.get("stages", False)
    return old or stages or (settings.enable_lora and row.get("lora", False))


# Some tensors of a captured step have a formula. They stay in the graphs' pool and once more in
# torch's own pool.
#
# vLLM runs each size once before it captures it, and torch's allocator caches that run's memory.

_LOGIT_BYTES: Final = 4
_FLASHINFER_HEADS: Final = frozenset({64, 128, 256})
_GATE_AND_UP: Final = 2
# vLLM's own kernels for NVFP4 experts reserve scales for this many tokens per chosen expert, one
# byte per 16 elements: VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE in vllm/envs.py, scaled_fp4_experts_quant
# in vllm/_custom_ops.py, 0.11 to 0.27.
_FP4_TOKENS: Final = 163_840
_FP4_ELEMENTS_A_WORD: Final = 64
_WORD_BYTES: Final = 4


def graph_buffers_bytes(settings: VllmSettings, shape: ModelShape, decode_tokens: int) -> int:
    """Return the bytes of the capture's buffers: indexer logits, dequantized weights, workspace.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
        decode_tokens: tokens of the largest captured decode-only step.
    """
    return (
        _indexer_logits(settings, shape, decode_tokens)
        + _dequantized(settings, shape)
        + _flashinfer_workspace(settings, shape)
    )


def _indexer_logits(settings: VllmSettings, shape: ModelShape, decode_tokens: int) -> int:
    """Return the logits of a sparse attention's indexer, one per key of the longest request.

    Other steps use the same dummy logits as the profile of the start (fp8_paged_mqa_logits in
    vllm/model_executor/layers/sparse_attn_indexer.py, 0.20 to 0.27).
    """
    if not has_indexer(shape):
        return 0
    logits = decode_tokens * ((settings.max_model_len or 0) // compressed(shape)) * _LOGIT_BYTES
    return logits + max(logits, int(constant("indexer_logits", settings.version)["bytes"]))


def _dequantized(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the largest projection of bitsandbytes weights in half precision.

    It is the MLP's first (bitsandbytes.matmul_4bit). In measured starts the second engine's own
    pool had space for it.
    """
    method = settings.quantization or (quantization_config(shape) or {}).get("quant_method")
    if method != "bitsandbytes":
        return 0
    width = (shape.number("intermediate_size") or 0) // settings.tensor_parallel_size
    if is_first_engine(settings):
        copies = 2
    else:
        copies = 1
    return copies * _GATE_AND_UP * width * shape.hidden * shape.dtype_bytes


def _flashinfer_workspace(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the workspace of FlashInfer's attention, which the first captured decode step makes.

    Source: _get_workspace_buffer in vllm/v1/attention/backends/flashinfer.py.
    """
    if _attends_with_flashinfer(settings, shape):
        return int(constant("flashinfer_workspace", by_engine(settings))["bytes"])
    return 0


def _attends_with_flashinfer(settings: VllmSettings, shape: ModelShape) -> bool:
    """Return whether vLLM chooses FlashInfer for attention (vllm/platforms/cuda.py, 0.13 to 0.32).

    It is the first choice on B200 and B300. Elsewhere it replaces FlashAttention, which needs
    Ampere or later, and Hopper for a cache of eight bits.
    """
    heads = {shape.head_dim, shape.number("global_head_dim") or shape.head_dim}
    if is_rocm(settings) or keeps_latent(shape) or not heads <= _FLASHINFER_HEADS:
        return False
    architecture = architecture_of(settings)
    if architecture == "turing" or (architecture == "blackwell" and has_nvlink(settings)):
        return True
    is_auto = settings.kv_cache_dtype == "auto"
    eight_bits = quantizes_cache(shape) if is_auto else settings.kv_cache_dtype.startswith("fp8")
    return eight_bits and architecture != "hopper"


def fp4_scales_bytes(settings: VllmSettings, shape: ModelShape) -> int:
    """Return the scales of both inputs of gated NVFP4 experts.

    They apply to GPUs with vLLM's own kernels: Blackwell cards without links. Three starts on a
    GB10 had none.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    chosen = shape.number("num_experts_per_tok") or 0
    gated = shape.model_type not in FAMILIES["types"]["ungated_experts"]
    linked = settings.unified_memory or has_nvlink(settings)
    own = gated and architecture_of(settings) in (None, "blackwell") and not linked
    if (shape.number("num_experts") or 0) <= 1 or not own or not is_nvfp4(shape):
        return 0
    width = (shape.number("moe_intermediate_size") or 0) // settings.tensor_parallel_size
    words = -(-shape.hidden // _FP4_ELEMENTS_A_WORD) + -(-width // _FP4_ELEMENTS_A_WORD)
    return _FP4_TOKENS * chosen * words * _WORD_BYTES


# Sizes increase by one step up to here, and by the version's own step beyond.
_FINE_UNTIL: Final = 256
_FINE_STEP: Final = 8
# A JSON object on the command line uses this to leave the sizes to the engine.
_LEFT_TO_ENGINE: Final = "null"


@dataclass(frozen=True, slots=True)
class Graphs:
    """Report the captured graphs: number, bytes, uncertainty and the engine's own estimate."""

    count: int
    bytes: int
    uncertainty_bytes: int
    estimated_bytes: int = 0


NO_GRAPHS: Final = Graphs(0, 0, 0)


def cuda_graphs(settings: VllmSettings, shape: ModelShape) -> Graphs:
    """Estimate the number and bytes of the graphs that a start captures.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    if settings.enforce_eager or settings.device == "cpu":
        return NO_GRAPHS
    counts = graph_counts(settings, shape)
    prior = constant("cudagraphs", by_engine(settings))
    captured = sum(prior[name] * count for name, count in counts.items())
    fitted = graphs_ratio(settings, prior["blackwell_ratio"]) * captured
    size = fitted + graph_buffers_bytes(settings, shape, largest_decode_step(settings))
    return Graphs(
        round(counts["bytes"]),
        round(size),
        round(prior["uncertainty_ratio"] * size),
        round(prior["estimate_ratio"] * size),
    )


def graph_counts(settings: VllmSettings, shape: ModelShape) -> dict[str, float]:
    """Return the multiplier of each fitted constant in the bytes of a start's graphs.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    decode_only = _captures_decode_only(settings, shape)
    graphs = captured_graphs(settings, decode_only=decode_only)
    if decode_only:
        largest = largest_decode_step(settings)
    else:
        largest = max(captured_sizes_of(settings), default=0)
    layers = graphs * shape.layers / settings.pipeline_parallel_size
    nccl = (
        settings.tensor_parallel_size > 1
        and not has_nvlink(settings)
        and not has_custom_allreduce(settings)
    )
    experts = int((shape.number("num_experts") or 0) > 1)
    quantized = settings.quantization is not None or quantization_config(shape) is not None
    return {
        "bytes": graphs,
        "bytes_per_layer": layers,
        "bytes_per_layer_without_links": layers * nccl,
        "bytes_per_token_and_hidden": largest * shape.hidden,
        "bytes_of_experts": experts,
        "bytes_of_quantized_experts": experts * quantized,
        "copies_of_fp4_scales": fp4_scales_bytes(settings, shape),
    }


def graphs_ratio(settings: VllmSettings, blackwell_ratio: float) -> float:
    """Return the size of graphs relative to other GPUs with a newer driver.

    Args:
        settings: vLLM's settings.
        blackwell_ratio: the ratio for Blackwell GPUs with their own memory.
    """
    ratio = driver_ratio(settings.driver_version)
    blackwell = architecture_of(settings) == "blackwell" and not settings.unified_memory
    if blackwell:
        return ratio * blackwell_ratio
    return ratio


def driver_ratio(driver_version: str | None) -> float:
    """Return the size of graphs with a driver relative to a driver since CUDA 12.4.

    An unknown driver counts as new.

    Raises:
        SettingError: the text is not a version.
    """
    if driver_version is None:
        return 1.0
    rule = tables()["old_driver"]
    major = driver_version.partition(".")[0]
    if not (major.isascii() and major.isdigit()):
        raise SettingError(
            f"driver_version must be a version, got {driver_version!r}",
            hint="for example 580.95.05",
        )
    if int(major) < rule["before"]:
        return float(rule["graphs_ratio"])
    return 1.0


def old_driver_note(settings: VllmSettings, graphs_bytes: int) -> str | None:
    """Return a sentence about graphs and an old driver, or None if it does not matter.

    Args:
        settings: vLLM's settings with all defaults filled in.
        graphs_bytes: the planned bytes of the graphs.

    Raises:
        SettingError: the driver's version is not a version.
    """
    driver = settings.driver_version
    rule = tables()["old_driver"]
    if not graphs_bytes or is_rocm(settings):
        return None
    ratio = f"{rule['graphs_ratio']} times"
    if driver is not None:
        if driver_ratio(driver) > 1:
            return (
                f"CUDA graphs: driver {driver} needs {ratio} as much as one since {rule['before']}"
            )
        return None
    if settings.version >= Version(rule["not_since"]):
        return None
    return (
        f"CUDA graphs: assumed a driver since {rule['before']}; an older one needs "
        f"{ratio} as much (--driver-version)"
    )


def captured_graphs(settings: VllmSettings, *, decode_only: bool = False) -> int:
    """Return the number of graphs: one per size, plus one per decode size with both modes.

    Args:
        settings: vLLM's settings with all defaults filled in.
        decode_only: whether the start captures no other steps.
    """
    rule = constant("captured_sizes", by_engine(settings))
    tokens = _request_tokens(settings)
    sizes = captured_sizes_of(settings)
    decode_sizes = []
    for size in sizes:
        if size >= tokens and size <= _most_decoded(settings):
            decode_sizes.append(size)
    if decode_only:
        graphs = len(decode_sizes)
    elif rule["decode_too"]:
        graphs = len(sizes) + len(decode_sizes)
    else:
        graphs = len(sizes)
    doubled = settings.enable_lora and since("lora_doubles_graphs_since", settings.version)
    if doubled:
        return 2 * graphs
    return graphs


def largest_decode_step(settings: VllmSettings) -> int:
    """Return the tokens of the largest captured decode-only step."""
    most = _most_decoded(settings)
    largest = 0
    for size in captured_sizes_of(settings):
        if size <= most:
            largest = max(largest, size)
    return largest


def _most_decoded(settings: VllmSettings) -> int:
    return (settings.max_num_seqs or 1) * _request_tokens(settings)


def _captures_decode_only(settings: VllmSettings, shape: ModelShape) -> bool:
    """Return whether a start captures decode steps only, as an encoder-decoder model's does.

    Source: FULL_DECODE_ONLY in vllm/config/vllm.py, 0.32.
    """
    both = constant("captured_sizes", by_engine(settings))["decode_too"]
    return both and encoder_decoder(shape.outer) is not None


def captured_sizes_of(settings: VllmSettings) -> set[int]:
    """Return the captured sizes.

    Versions that draft whole requests' tokens capture only sizes that a step can have.
    """
    version = by_engine(settings)
    rule = constant("captured_sizes", by_engine(settings))
    sizes = _sizes(settings, rule, settings.max_num_seqs or 1)
    step = settings.max_num_batched_tokens
    found = set(sizes)
    if step:
        found = _up_to(step, found)
    if since("drafts_round_graphs_since", version):
        tokens = _request_tokens(settings)
    else:
        tokens = 1
    most = max(found, default=0)
    whole = {-(-size // tokens) * tokens for size in found}
    return _up_to(max(most, tokens), whole)


def _up_to(most: int, sizes: Iterable[int]) -> set[int]:
    found = set()
    for size in sizes:
        if size <= most:
            found.add(size)
    return found


def _request_tokens(settings: VllmSettings) -> int:
    """Return the tokens per request in a decode-only step: the drafted ones plus one."""
    drafts = read_speculation(settings.speculative_config)
    if drafts is None:
        return 1
    return 1 + drafts.tokens


def _sizes(settings: VllmSettings, rule: dict[str, Any], rows: int) -> set[int]:
    """Return the given sizes, or the version's sizes up to the given or default maximum."""
    given = settings.cudagraph_capture_sizes
    if given is not None and given != _LEFT_TO_ENGINE:
        return given_sizes(given)
    if since("drafts_widen_graphs_since", by_engine(settings)):
        drafted = _request_tokens(settings)
    else:
        drafted = 1
    most = min(rule["most_tokens"], rows * rule["tokens_per_row"] * drafted)
    if settings.max_cudagraph_capture_size is not None:
        most = settings.max_cudagraph_capture_size
    sizes = captured_sizes(most, rule["coarse_step_tokens"])
    if rule["rows_too"] and rows <= most:
        return sizes | {rows}
    return sizes


def given_sizes(text: str) -> set[int]:
    """Parse ``cudagraph_capture_sizes``: words of the command line or a JSON list.

    Raises:
        SettingError: there are none, or one is not a count.
    """
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise SettingError(
            f"cudagraph_capture_sizes must be a list of counts, got {text!r}",
            hint="for example 1 2 4 8",
        )
    return {int(word) for word in words}


def captured_sizes(most_tokens: int, coarse_step_tokens: int) -> set[int]:
    """Return the captured batch sizes: 1, 2, 4, multiples of 8 below 256, then coarser steps."""
    fine = range(_FINE_STEP, _FINE_UNTIL, _FINE_STEP)
    coarse = range(_FINE_UNTIL, most_tokens + 1, coarse_step_tokens)
    found: set[int] = set()
    for size in (1, 2, 4, *fine, *coarse):
        if size <= most_tokens:
            found.add(size)
    return found


@dataclass(frozen=True, slots=True)
class FixedParts:
    """Report the bytes of each part on one GPU, with uncertainties in both directions.

    ``counted_cudagraph_bytes`` is the version's deduction from its utilization for CUDA graphs,
    ``cudagraph_bytes`` their final size. ``not_free_bytes`` is all memory not free at the start:
    the CUDA context if nothing else is known.
    """

    non_torch_bytes: int = 0
    cudagraph_bytes: int = 0
    counted_cudagraph_bytes: int = 0
    not_free_bytes: int = 0
    uncertainty_bytes: int = 0
    cudagraph_uncertainty_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Return the total of all parts once the engine runs."""
        return self.non_torch_bytes + self.cudagraph_bytes + self.not_free_bytes


def counts_graphs(settings: VllmSettings, shape: ModelShape) -> bool:
    """Return whether this version deducts its CUDA graph estimate from the utilization."""
    runner = model_runner(settings.version, shape)
    counted = bool(constant("cudagraph_accounting", settings.version, runner=runner)["subtracted"])
    there = not is_rocm(settings) or since("rocm_graphs_counted_since", settings.version)
    return counted and there and not settings.enforce_eager and settings.device != "cpu"


def fixed_parts(settings: VllmSettings, shape: ModelShape) -> FixedParts:
    """Return the priors, corrected by a measured start of the model."""
    if settings.device == "cpu":
        found = FixedParts()
    else:
        found = _priors(settings, shape)
    if (correction := settings.correction) is not None:
        graphs = found.cudagraph_bytes + (
            correction.cudagraph_bytes if found.cudagraph_bytes else 0
        )
        found = replace(
            found,
            non_torch_bytes=found.non_torch_bytes + correction.non_torch_bytes,
            cudagraph_bytes=graphs,
            counted_cudagraph_bytes=graphs if found.counted_cudagraph_bytes else 0,
        )
    if settings.device_free_bytes is not None:
        found = replace(found, not_free_bytes=settings.gpu_total_bytes - settings.device_free_bytes)
    return found


def _priors(settings: VllmSettings, shape: ModelShape) -> FixedParts:
    version = settings.version
    ranks = settings.tensor_parallel_size
    linked = int(ranks > 1 and has_nvlink(settings))
    where = {
        "unified": int(settings.unified_memory),
        "nvlink": linked,
        "tensor_ranks": ranks,
        "stages": settings.pipeline_parallel_size,
        "rocm": int(is_rocm(settings)),
        "hopper": int(is_hopper_or_later(settings)),
    }
    other = constant("non_torch", version, **where)
    graphs = cuda_graphs(settings, shape)
    counted = counts_graphs(settings, shape)
    if counted:
        graphs_uncertainty = graphs.uncertainty_bytes
    else:
        graphs_uncertainty = 0
    between, between_uncertainty = _between_nodes(settings)
    own = other["bytes"] + fused_allreduce_bytes(settings) - _left_out(settings, linked)
    return FixedParts(
        non_torch_bytes=max(0, own, between),
        cudagraph_bytes=graphs.bytes,
        counted_cudagraph_bytes=graphs.estimated_bytes if counted else 0,
        not_free_bytes=constant("context", version)["bytes"],
        uncertainty_bytes=round(
            math.hypot(other["uncertainty_bytes"], graphs_uncertainty, between_uncertainty)
        ),
        cudagraph_uncertainty_bytes=graphs_uncertainty,
    )


def _between_nodes(settings: VllmSettings) -> tuple[int, int]:
    """Return the bytes of NCCL between machines and their uncertainty; zeros for one machine."""
    known = tables()["several_nodes"]
    node = known["ranks_of_a_node"]
    if settings.tensor_parallel_size * settings.pipeline_parallel_size <= node:
        return 0, 0
    if settings.tensor_parallel_size <= node:
        return 0, known["uncertainty_bytes"]
    if not has_nvlink(settings):  # one machine may have sixteen such cards
        return 0, known["tensor_bytes"]
    return known["tensor_bytes"], known["uncertainty_bytes"]


def _left_out(settings: VllmSettings, linked: int) -> int:
    """Return the priors' share of a custom all-reduce that is off.

    More than two ranks only have one over links.
    """
    off = settings.disable_custom_all_reduce and (
        linked or settings.tensor_parallel_size == UNLINKED_RANKS
    )
    if off:
        return int(constant("custom_allreduce", settings.version)["bytes"])
    return 0


def free_uncertain_bytes(settings: VllmSettings) -> int:
    """Return by how much more memory may be free at the start than assumed; 0 if it was measured.

    Without a measurement it is the spread of CUDA contexts, or of the free memory of devices that
    share the host's.
    """
    if settings.device_free_bytes is None:
        return int(constant("context", settings.version)["uncertainty_bytes"])
    if not settings.device_free_from:
        return 0
    ratio = float(tables()["defaults"]["most_free_of_shared_ratio"])
    return max(0, round(ratio * settings.gpu_total_bytes) - settings.device_free_bytes)


def page_cache_bytes(settings: VllmSettings, weights_bytes: int) -> int:
    """Return the page cache that a start may lose if the GPU shares the host's memory.

    Reading the weights fills the page cache. Versions that trust the driver's free memory count it
    as their own, unless it already contains the files. Other versions have 0.
    """
    counted = settings.unified_memory and not since("page_cache_counted_until", settings.version)
    if counted and settings.device != "cpu":
        return weights_bytes
    return 0


def uncertainties(
    settings: VllmSettings, fixed: FixedParts, peak_uncertainty_bytes: int
) -> Iterator[int]:
    """Yield the uncertainty of each independent part in bytes.

    After a measured start it is the rounding of its printed numbers. Parts measured under other
    settings use the prior's uncertainty.
    """
    measured = settings.correction
    if measured is None:
        yield peak_uncertainty_bytes
        yield fixed.uncertainty_bytes
        return
    yield measured.uncertainty_bytes
    now = (settings.max_num_seqs, settings.max_num_batched_tokens)
    if measured.max_num_seqs and now != (measured.max_num_seqs, measured.max_num_batched_tokens):
        yield peak_uncertainty_bytes
    if measured.max_num_seqs and measured.enforce_eager and not settings.enforce_eager:
        yield fixed.cudagraph_uncertainty_bytes
