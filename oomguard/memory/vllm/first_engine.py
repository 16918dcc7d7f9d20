"""Whether vLLM's first engine makes a start: it compiles no step, and captures one graph for each number of requests.

For some versions both engines were there, and settings or the GPU decided. Source: _is_v1_supported_oracle in vllm/engine/arg_utils.py
of 0.8.2 to 0.10.2; what a plan does not know of a start (load formats, a background thread) is left out.
"""

from __future__ import annotations

from typing import Final

from packaging.version import Version

from oomguard.memory.constants import rows_of, since
from oomguard.memory.vllm.known_gpu import architecture_of
from oomguard.memory.vllm.start import VllmSettings

# What the first engine's tables are read by where a version has both.
LAST_OF_FIRST: Final = Version("0.7.3")


def by_engine(settings: VllmSettings) -> Version:
    """Return the version whose rules a start follows: its own, or the first engine's last one."""
    return (
        LAST_OF_FIRST if is_first_engine(settings) and since("compiled_since", settings.version) else settings.version
    )


def is_first_engine(settings: VllmSettings) -> bool:
    """Whether the first engine makes a start."""
    if not since("compiled_since", settings.version):
        return True
    row = next(iter(rows_of("first_engine", settings.version)), None)
    if row is None or settings.device == "cpu":
        return False
    old = architecture_of(settings) in row["architectures"]
    stages = settings.pipeline_parallel_size > 1 and row.get("stages", False)
    return old or stages or (settings.enable_lora and row.get("lora", False))
