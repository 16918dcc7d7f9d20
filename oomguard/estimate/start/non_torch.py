"""Estimate the parts of a start without a formula: non-torch memory, CUDA graphs, and the rest.

They are priors by version, ranks and links until a start of the model was measured
(calibration.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from oomguard.estimate.constants import constant, since, tables
from oomguard.estimate.model.shape import ModelShape
from oomguard.estimate.start.activations import model_runner
from oomguard.estimate.start.cuda_graphs import cuda_graphs
from oomguard.estimate.start.defaults import (
    UNLINKED_RANKS,
    fused_allreduce_bytes,
    has_nvlink,
    is_hopper_or_later,
    is_rocm,
)
from oomguard.estimate.start.start import VllmSettings


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
    """Return the bytes of NCCL between machines and their uncertainty, or zeros for one machine."""
    known = tables()["several_nodes"]
    node = known["ranks_of_a_node"]
    if settings.tensor_parallel_size * settings.pipeline_parallel_size <= node:
        return 0, 0
    if settings.tensor_parallel_size <= node:
        return 0, known["uncertainty_bytes"]
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
