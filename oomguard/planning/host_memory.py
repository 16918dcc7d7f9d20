"""Estimate the host's memory of a planned vLLM start: processes, offloaded weights and KV cache.

torch rounds each pinned block up to a power of two, so an offloaded weight may take almost twice
its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB, format_gib, parse_size
from oomguard.estimate.model.model import Model
from oomguard.estimate.start.kv_cache import start_caches
from oomguard.estimate.start.start import VllmSettings

# Besides its share of the offloaded KV cache a worker had 3 GB of host memory: the measurements of
# https://github.com/vllm-project/vllm/pull/48436 (2 ranks, 64 and 80 GiB).
_WORKER_BYTES: Final = 3 * GIB
# The API server and the engine core, which load no weights.
_SERVER_BYTES: Final = 2 * GIB
# From this version on the KV cache on the host is one mapping of the requested size, not one pinned
# block for each rank: https://github.com/vllm-project/vllm/pull/50094, measured in 0.26.0 in
# https://github.com/vllm-project/vllm/issues/53042.
_MAPPED_SINCE: Final = Version("0.26")
# Of the same issue: 769.0 of 400 GiB and 385.0 of 200 GiB, with four groups of layers.
_GROUPS_RATIO: Final = 1.925
# The last versions with an engine that uses swap space.
_NO_SWAP_SINCE: Final = Version("0.11")


@dataclass(frozen=True, slots=True)
class HostPart:
    """Hold one part of the host's memory; ``source`` is ``solved`` or ``prior``."""

    name: str
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Hold the host's memory of a start, all ranks on one host together.

    Attributes:
        parts: what takes the memory.
        limit_bytes: the memory of the host or container; None if it is unknown.
    """

    parts: tuple[HostPart, ...]
    limit_bytes: int | None

    @property
    def need_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool | None:
        """Return whether the host can hold it; None if its memory is unknown."""
        if self.limit_bytes is None:
            return None
        return self.need_bytes <= self.limit_bytes

    def record(self) -> dict[str, Any]:
        """Return the budget as JSON."""
        return {
            "need_bytes": self.need_bytes,
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "parts": [
                {"name": part.name, "bytes": part.bytes, "source": part.source}
                for part in self.parts
            ],
        }

    def line(self) -> str:
        """Return the budget as one line for the terminal."""
        parts = ", ".join(f"{part.name} {format_gib(part.bytes)}" for part in self.parts)
        need = f"host memory: needs {format_gib(self.need_bytes)}"
        if self.limit_bytes is None:
            return f"{need} ({parts})"
        if self.fits:
            verdict = f"the host has {format_gib(self.limit_bytes)}"
        else:
            verdict = f"does not fit: the host has only {format_gib(self.limit_bytes)}"
        return f"{need} ({parts}); {verdict}"


def host_of_start(
    model: Model,
    settings: VllmSettings,
    *,
    host_memory: str | int | None = None,
    kv_offloading_size: float = 0,
    swap_space: float = 0,
) -> HostBudget | None:
    """Return the host's memory of a start; None if no argument concerns it.

    The arguments are those of ``oomguard.plan``; sizes of vLLM's flags are in GiB.

    Raises:
        SettingError: a size is not finite or has no unit.
    """
    if not (kv_offloading_size or swap_space or host_memory or settings.cpu_offload_bytes):
        return None
    limit: int | None
    if isinstance(host_memory, str):
        limit = parse_size(host_memory).bytes
    else:
        limit = host_memory
    return plan_host(
        model,
        settings,
        kv_offloading_bytes=bytes_of_gib("kv_offloading_size", kv_offloading_size),
        swap_bytes=bytes_of_gib("swap_space", swap_space),
        limit_bytes=limit,
        layer_groups=len(start_caches(model, settings).layout.groups),
    )


def bytes_of_gib(name: str, size_gib: float) -> int:
    """Return the bytes of a flag in GiB.

    Raises:
        SettingError: the size is not finite.
    """
    if not math.isfinite(size_gib):
        raise SettingError(f"{name} must be a finite number, got {size_gib}")
    return round(size_gib * GIB)


def plan_host(
    model: Model,
    settings: VllmSettings,
    *,
    kv_offloading_bytes: int = 0,
    swap_bytes: int = 0,
    limit_bytes: int | None = None,
    layer_groups: int = 1,
) -> HostBudget:
    """Estimate the host's memory of a start.

        plan_host(model, settings, kv_offloading_bytes=80 << 30, limit_bytes=128 << 30).fits

    Args:
        model: the model.
        settings: the settings of the start; its ranks are all on this host.
        kv_offloading_bytes: the KV cache on the host, all ranks together.
        swap_bytes: the swap space of each rank, which only old versions use.
        limit_bytes: the memory of the host or container; None if it is unknown.
        layer_groups: the groups of layers with their own KV cache blocks.
    """
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    ranks *= settings.data_parallel_size
    parts = [HostPart("processes", _SERVER_BYTES + ranks * _WORKER_BYTES, "prior")]
    if settings.cpu_offload_bytes:
        size = offloaded_bytes(model, settings.cpu_offload_bytes, ranks)
        parts.append(HostPart("offloaded weights", ranks * size, "solved"))
    if kv_offloading_bytes:
        size = _offloaded_kv_bytes(kv_offloading_bytes, ranks, settings.version, layer_groups)
        parts.append(HostPart("offloaded KV cache", size, "solved"))
    if swap_bytes and settings.version < _NO_SWAP_SINCE:
        parts.append(HostPart("swap space", ranks * swap_bytes, "solved"))
    return HostBudget(tuple(parts), limit_bytes)


def offloaded_bytes(model: Model, asked_bytes: int, ranks: int) -> int:
    """Return the pinned bytes of one rank's offloaded weights.

    vLLM moves whole parameters in their order until it has moved ``asked_bytes``.
    """
    moved = 0
    pinned = 0
    for parameter in model.parameters:
        if moved >= asked_bytes:
            break
        size = max(1, round(parameter.bytes / ranks))
        moved += size
        pinned += rounded_up(size)
    return pinned


def rounded_up(size_bytes: int) -> int:
    """Return the next power of two, which torch's allocator of pinned memory takes."""
    return 1 << max(0, size_bytes - 1).bit_length()


def _offloaded_kv_bytes(asked_bytes: int, ranks: int, version: Version, groups: int) -> int:
    if version < _MAPPED_SINCE:
        return ranks * rounded_up(round(asked_bytes / ranks))
    if groups > 1:
        return round(asked_bytes * _GROUPS_RATIO)
    return asked_bytes
