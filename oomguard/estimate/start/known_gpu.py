"""The GPU of a start among those that are known: its architecture and its links decide what an
engine pads and keeps.
"""

from __future__ import annotations

import re
from typing import Any, Final

from oomguard.estimate.constants import gpus, plain_name, rows_of, tables
from oomguard.estimate.start.start import VllmSettings

# Boards of one name differ by that much in what the driver gives: ECC, firmware.
_SAME_SIZE_RATIO: Final = 0.005
# The most ranks between which vLLM makes a custom all-reduce without links:
# vllm/distributed/device_communicators/custom_all_reduce.py.
UNLINKED_RANKS: Final = 2
# As NVIDIA names its cards for workstations and servers.
_ARCHITECTURE: Final = re.compile(r"(?i)\b(blackwell|hopper|ada|ampere|turing)\b")


def known_gpu(settings: VllmSettings) -> dict[str, Any] | None:
    """Return the row of a start's GPU: by its name, else by its size; None for one that is not
    known.
    """
    if settings.gpu_name:
        name = plain_name(settings.gpu_name)
        named = [row for row in gpus() if plain_name(row["name"]) in name]
        if named:
            return max(named, key=lambda row: len(row["name"]))
    total = settings.gpu_total_bytes
    sized = [row for row in gpus() if not row.get("named_only")]
    nearest = min(sized, key=lambda row: abs(row["total_bytes"] - total))
    if abs(nearest["total_bytes"] - total) <= _SAME_SIZE_RATIO * total:
        return nearest
    return None


def has_nvlink(settings: VllmSettings) -> bool:
    """Whether the GPUs of a start talk over links of their own; of one that is not known its size
    decides.
    """
    row = known_gpu(settings)
    if row is not None:
        return bool(row.get("nvlink", False))
    return settings.gpu_total_bytes >= int(tables()["defaults"]["nvlink_from_bytes"])


def architecture_of(settings: VllmSettings) -> str | None:
    """Return the architecture of a start's GPU: a known one's, else that which its name says; None
    where neither tells.
    """
    row = known_gpu(settings)
    name = settings.gpu_name or ""
    said = _ARCHITECTURE.search(name)
    named = row is not None and plain_name(row["name"]) in plain_name(name)
    if said is not None and not named:
        return said[1].lower()
    if row is None:
        return None
    return str(row["architecture"])


def has_custom_allreduce(settings: VllmSettings) -> bool:
    """Whether the ranks' all-reduces in CUDA graphs are vLLM's own, which needs links, or two GPUs
    that read each other's memory.
    """
    ranks = settings.tensor_parallel_size
    if ranks == 1 or settings.disable_custom_all_reduce:
        return False
    reads = bool((known_gpu(settings) or {}).get("peer_access", True))
    return has_nvlink(settings) or (ranks == UNLINKED_RANKS and reads)


def fused_allreduce_bytes(settings: VllmSettings) -> int:
    """Return what the fused all-reduce's buffers take on each rank, 0 where the version or the GPU
    has none.
    """
    ranks, architecture = settings.tensor_parallel_size, architecture_of(settings)
    alone = (
        settings.pipeline_parallel_size == 1
        and settings.data_parallel_size == 1
        and not settings.enforce_eager
    )
    if ranks == 1 or not alone or not has_nvlink(settings):
        return 0
    rows = (
        row
        for row in rows_of("fused_allreduce", settings.version)
        if architecture in row["architectures"]
    )
    row = next(rows, None)
    if row is None:
        return 0
    return int(row["bytes_of_ranks"].get(str(ranks), 0))


def is_hopper_or_later(settings: VllmSettings) -> bool:
    """Whether the GPU is one of Hopper, or of Blackwell with links: their libraries take more."""
    architecture = architecture_of(settings)
    return architecture == "hopper" or (architecture == "blackwell" and has_nvlink(settings))


def is_rocm(settings: VllmSettings) -> bool:
    """Whether the GPU of a start is one of AMD's that are known."""
    return architecture_of(settings) in tables()["defaults"]["rocm_architectures"]


def mxfp4_padding(settings: VllmSettings, hidden: int, width: int) -> float:
    """Return by which factor MXFP4 experts grow in the engine, whose kernels want multiples of the
    hidden size and the width.

    Args:
        settings: vLLM's settings.
        hidden: the hidden size.
        width: the experts' width on one rank.
    """
    architecture = "cpu" if settings.device == "cpu" else architecture_of(settings)
    rows = tables()["mxfp4_padding"]
    rule = next((row for row in rows if row.get("architecture") == architecture), rows[-1])
    return _multiple(hidden, rule["hidden"]) / hidden * _multiple(width, rule["width"]) / width


def nvfp4_padding(settings: VllmSettings, width: int) -> float:
    """Return by which factor NVFP4 experts without a gate grow in the engine: a GPU that is not
    known counts as one that computes in it.
    """
    architecture = architecture_of(settings)
    rule = tables()["nvfp4_padding"][0]
    own = architecture is None or architecture in rule["architectures"]
    if own and settings.device != "cpu":
        return _multiple(width, rule["width"]) / width
    return 1.0


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of
