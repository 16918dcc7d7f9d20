"""The size of this machine's GPUs, for an engine that failed here and did not print it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from oomguard.facts import Fact
from oomguard.incident import Incident

# NVML counts what the driver keeps for itself and torch does not: 0.6 % of an H100, 2 % of an L4.
_DRIVERS_RATIO: Final = 0.02
_TOTAL: Final = "device_total_bytes"


def own_device_total(incident: Incident) -> Mapping[str, Fact]:
    """Return the total of this machine's GPUs as a fact; empty where it was printed, is unknown, or differs between them.

    vLLM prints it for some failures only; "No available memory for the cache blocks" is not one of them, and how far the
    utilization has to rise depends on it. A part of a GPU (MIG) has a size that NVML's device does not tell.

    Args:
        incident: what failed, on this machine, just now.
    """
    if incident.framework != "vllm" or _TOTAL in incident.facts or "on_cpu" in incident.facts:
        return {}
    if "MIG" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return {}
    from oomguard.observe.nvml import devices

    totals = {device.total_bytes for device in devices() or ()}
    if len(totals) != 1 or not (total := totals.pop()):
        return {}
    return {_TOTAL: Fact(_TOTAL, total, "measured", _DRIVERS_RATIO * total)}
