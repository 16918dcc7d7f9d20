"""What a plan keeps back of a pool: what starts elsewhere took beyond the parts that a plan knows.

A pool that is planned too large costs a start, one that is too small costs some requests. So the figure of a plan is not the middle of
where starts lay but one that six in ten reached: the parts, less a share of the device. Of a version on a GPU of which several starts were
measured the parts are known, and nothing is kept back. benchmarks/fit_constants.py measures both and writes them to fitted.toml.
"""

from __future__ import annotations

from oomguard.facts import format_gib
from oomguard.memory.constants import kept_back, measured_groups
from oomguard.memory.vllm.known_gpu import known_gpu
from oomguard.memory.vllm.start import VllmSettings


def kept_back_bytes(settings: VllmSettings) -> int:
    """Return what a start's pool is planned smaller by than its parts leave.

    Args:
        settings: vLLM's settings with all defaults filled in.
    """
    told = settings.correction is not None or settings.kv_cache_memory_bytes is not None
    if settings.device == "cpu" or told or _is_measured(settings):
        return 0
    return round(kept_back()["device_ratio"] * settings.gpu_total_bytes)


def of_kept_back(kept_bytes: int) -> str:
    """Return the sentence on what is kept back."""
    share = f"{kept_back()['quantile']:.0%} of starts of other versions and GPUs"
    return f"kept back: {format_gib(kept_bytes)}, what {share} took beyond these parts at most"


def _is_measured(settings: VllmSettings) -> bool:
    """Whether several starts of this version on this GPU are among those that the constants come from."""
    gpu, version = known_gpu(settings), settings.version
    return gpu is not None and (f"{version.major}.{version.minor}", gpu["name"]) in measured_groups()
