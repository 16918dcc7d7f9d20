"""CUDA graphs of a start: how many are captured, by the sizes given or the version's rules, and the bytes of each by measured starts.

One takes a base, more with the hidden size, and more for each other rank that a layer's all-reduces are with; of both a pipeline
stage has its share.
constants.toml has the sizes by version with their sources, fitted.toml the bytes that a fit found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from oomguard.errors import SettingError
from oomguard.memory.constants import constant
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.first_engine import by_engine
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
    count = captured_graphs(settings)
    prior = constant("cudagraphs", by_engine(settings))
    peers = shape.layers * (settings.tensor_parallel_size - 1)
    share = 1 / settings.pipeline_parallel_size
    each = prior["bytes"] + share * (
        shape.hidden * prior["bytes_per_hidden"] + peers * prior["bytes_per_layer_and_peer"]
    )
    size = count * each
    return Graphs(count, round(size), round(prior["uncertainty_ratio"] * size), round(prior["estimate_ratio"] * size))


def captured_graphs(settings: VllmSettings) -> int:
    """Return how many graphs a start captures: one for each size, and where the version has both modes another for each decode size."""
    rule = constant("captured_sizes", by_engine(settings))
    rows = settings.max_num_seqs or 1
    sizes = {size for size in _sizes(settings, rule, rows) if size <= (settings.max_num_batched_tokens or size)}
    return len(sizes) + (sum(size <= rows for size in sizes) if rule["decode_too"] else 0)


def _sizes(settings: VllmSettings, rule: dict[str, Any], rows: int) -> set[int]:
    """Return the sizes that are given, else those of the version's rule up to the largest that is given or its own."""
    given = settings.cudagraph_capture_sizes
    if given is not None and given != _LEFT_TO_ENGINE:
        return given_sizes(given)
    most = min(rule["most_tokens"], rows * rule["tokens_per_row"])
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
