"""CUDA graphs of a start: how many are captured, by the sizes given or the version's rules, and the bytes of each by measured starts.

Each takes a base, more for each layer, and more again where NCCL's all-reduces without links are captured with it: those over links,
and vLLM's own custom ones between two GPUs, take nothing. All share one pool, which the largest size makes: so many tokens of the
hidden size. Experts take more once, quantized ones most, by measured starts alone. Blackwell's take less, drivers older than CUDA
12.4's several times as much for all of it. graph_buffers.py has what a formula gives. constants.toml has the sizes by version with
their sources, fitted.toml the bytes that a fit found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from packaging.version import Version

from oomguard.errors import SettingError
from oomguard.memory.constants import constant, since, tables
from oomguard.memory.model.drafts import read_speculation
from oomguard.memory.model.quantized import quantization_config
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.first_engine import by_engine
from oomguard.memory.vllm.graph_buffers import fp4_scales_bytes, graph_buffers_bytes
from oomguard.memory.vllm.known_gpu import architecture_of, has_custom_allreduce, has_nvlink, is_rocm
from oomguard.memory.vllm.start import VllmSettings

# Sizes go by one step up to here and by the version's own beyond.
_FINE_UNTIL: Final = 256
_FINE_STEP: Final = 8
# How an object on the command line leaves the sizes to the engine.
_LEFT_TO_ENGINE: Final = "null"


@dataclass(frozen=True, slots=True)
class Graphs:
    """The captured graphs of a start: how many, the bytes of all, by how much those may be off, and the engine's own estimate."""

    count: int
    bytes: int
    uncertainty_bytes: int
    estimated_bytes: int = 0


NO_GRAPHS: Final = Graphs(0, 0, 0)


def cuda_graphs(settings: VllmSettings, shape: ModelShape) -> Graphs:
    """Count and weigh the graphs that a start captures.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    if settings.enforce_eager or settings.device == "cpu":
        return NO_GRAPHS
    counts = graph_counts(settings, shape)
    prior = constant("cudagraphs", by_engine(settings))
    fitted = graphs_ratio(settings, prior["blackwell_ratio"]) * sum(
        prior[name] * count for name, count in counts.items()
    )
    size = fitted + graph_buffers_bytes(settings, shape, largest_decode_step(settings))
    return Graphs(
        captured_graphs(settings),
        round(size),
        round(prior["uncertainty_ratio"] * size),
        round(prior["estimate_ratio"] * size),
    )


def graph_counts(settings: VllmSettings, shape: ModelShape) -> dict[str, float]:
    """Return how often each constant of fitted.toml counts in what a start's graphs take.

    Args:
        settings: vLLM's settings with all defaults filled in.
        shape: the model's numbers.
    """
    sizes = captured_sizes_of(settings)
    graphs = captured_graphs(settings)
    layers = graphs * shape.layers / settings.pipeline_parallel_size
    nccl = settings.tensor_parallel_size > 1 and not has_nvlink(settings) and not has_custom_allreduce(settings)
    experts = int((shape.number("num_experts") or 0) > 1)
    quantized = settings.quantization is not None or quantization_config(shape) is not None
    return {
        "bytes": graphs,
        "bytes_per_layer": layers,
        "bytes_per_layer_without_links": layers * nccl,
        "bytes_per_token_and_hidden": max(sizes, default=0) * shape.hidden,
        "bytes_of_experts": experts,
        "bytes_of_quantized_experts": experts * quantized,
        "copies_of_fp4_scales": fp4_scales_bytes(settings, shape),
    }


def graphs_ratio(settings: VllmSettings, blackwell_ratio: float) -> float:
    """Return by how much graphs take more or less than those of other GPUs with a newer driver.

    Args:
        settings: vLLM's settings.
        blackwell_ratio: what those of Blackwell take of others', where its memory is its own.
    """
    ratio = driver_ratio(settings.driver_version)
    blackwell = architecture_of(settings) == "blackwell" and not settings.unified_memory
    return ratio * blackwell_ratio if blackwell else ratio


def driver_ratio(driver_version: str | None) -> float:
    """Return by how much graphs take more with a driver than with one since CUDA 12.4, which one that is not known is taken for.

    Raises:
        SettingError: the driver's version is none.
    """
    if driver_version is None:
        return 1.0
    rule, major = tables()["old_driver"], driver_version.partition(".")[0]
    if not (major.isascii() and major.isdigit()):
        raise SettingError(f"driver_version is {driver_version!r}, not a version", hint="for example 580.95.05")
    return float(rule["graphs_ratio"]) if int(major) < rule["before"] else 1.0


def of_old_driver(settings: VllmSettings, graphs_bytes: int) -> str | None:
    """Return the sentence on a start's graphs and an old driver: it has one, or may have one; None where neither counts.

    Args:
        settings: vLLM's settings with all defaults filled in.
        graphs_bytes: what the graphs are planned with.

    Raises:
        SettingError: the driver's version is none.
    """
    driver, rule = settings.driver_version, tables()["old_driver"]
    if not graphs_bytes or is_rocm(settings):
        return None
    ratio = f"{rule['graphs_ratio']} times"
    if driver is not None:
        return (
            f"CUDA graphs: driver {driver} takes {ratio} as much as one since {rule['before']}"
            if driver_ratio(driver) > 1
            else None
        )
    if settings.version >= Version(rule["not_since"]):
        return None
    return f"CUDA graphs: of a driver since {rule['before']}; an older one takes {ratio} as much (--driver-version)"


def captured_graphs(settings: VllmSettings) -> int:
    """Return how many graphs a start captures: one for each size, and where the version has both modes another for each decode size."""
    rule, rows = constant("captured_sizes", by_engine(settings)), settings.max_num_seqs or 1
    sizes, tokens = captured_sizes_of(settings), _request_tokens(settings)
    graphs = len(sizes)
    if rule["decode_too"]:
        graphs += sum(tokens <= size <= rows * tokens for size in sizes)
    doubled = settings.enable_lora and since("lora_doubles_graphs_since", settings.version)
    return 2 * graphs if doubled else graphs


def largest_decode_step(settings: VllmSettings) -> int:
    """Return the tokens of the largest captured step that only decodes."""
    most = (settings.max_num_seqs or 1) * _request_tokens(settings)
    return max((size for size in captured_sizes_of(settings) if size <= most), default=0)


def captured_sizes_of(settings: VllmSettings) -> set[int]:
    """Return the sizes that are captured: those that a step can have, in versions that draft whole requests' tokens."""
    version, rule = by_engine(settings), constant("captured_sizes", by_engine(settings))
    sizes, step = _sizes(settings, rule, settings.max_num_seqs or 1), settings.max_num_batched_tokens
    found = {size for size in sizes if size <= (step or size)}
    tokens = _request_tokens(settings) if since("drafts_round_graphs_since", version) else 1
    most = max(found, default=0)
    whole = {-(-size // tokens) * tokens for size in found}
    return {size for size in whole if size <= max(most, tokens)}


def _request_tokens(settings: VllmSettings) -> int:
    """Return the tokens of one request in a step that only decodes: those that are drafted, and one."""
    drafts = read_speculation(settings.speculative_config)
    return 1 if drafts is None else 1 + drafts.tokens


def _sizes(settings: VllmSettings, rule: dict[str, Any], rows: int) -> set[int]:
    """Return the sizes that are given, else those of the version's rule up to the largest that is given or its own."""
    given = settings.cudagraph_capture_sizes
    if given is not None and given != _LEFT_TO_ENGINE:
        return given_sizes(given)
    drafted = _request_tokens(settings) if since("drafts_widen_graphs_since", by_engine(settings)) else 1
    most = min(rule["most_tokens"], rows * rule["tokens_per_row"] * drafted)
    if settings.max_cudagraph_capture_size is not None:
        most = settings.max_cudagraph_capture_size
    sizes = captured_sizes(most, rule["coarse_step_tokens"])
    return sizes | {rows} if rule["rows_too"] and rows <= most else sizes


def given_sizes(text: str) -> set[int]:
    """Return the sizes in ``cudagraph_capture_sizes``, words of the command line or a list of JSON.

    Raises:
        SettingError: there are none, or one is no count.
    """
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise SettingError(f"cudagraph_capture_sizes is {text!r}", hint="for example 1 2 4 8")
    return {int(word) for word in words}


def captured_sizes(most_tokens: int, coarse_step_tokens: int) -> set[int]:
    """Return the batch sizes that are captured: 1, 2, 4, each multiple of 8 below 256, then by the coarser step."""
    fine = range(_FINE_STEP, _FINE_UNTIL, _FINE_STEP)
    coarse = range(_FINE_UNTIL, most_tokens + 1, coarse_step_tokens)
    return {size for size in (1, 2, 4, *fine, *coarse) if size <= most_tokens}
