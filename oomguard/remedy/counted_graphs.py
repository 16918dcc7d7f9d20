"""A KV cache that has no room because an engine keeps room for CUDA graphs: without the graphs, or without keeping it."""

from __future__ import annotations

from oomguard.facts import format_gib
from oomguard.incident import Incident
from oomguard.remedy.solution import Solution

_MISSING = "memory of the CUDA graphs: not printed"


def without_graphs(incident: Incident) -> Solution:
    """Capture no CUDA graphs: what the engine keeps for them becomes KV cache."""
    return _freed(incident, True, "is kept for CUDA graphs and becomes KV cache")


def without_graph_estimate(incident: Incident) -> Solution:
    """Keep no room for CUDA graphs beforehand: they are captured from what the utilization leaves of the device."""
    return _freed(
        incident, 0, "is the estimate for CUDA graphs; it becomes KV cache, and graphs take what is left beside it"
    )


def _freed(incident: Incident, value: int, what: str) -> Solution:
    size, left = incident.number("cudagraph_bytes"), incident.number("kv_cache_available_bytes")
    if not size:
        return Solution(None, f"by how much is not known ({_MISSING})", unknown=(_MISSING,))
    predicts = {} if left is None else {"kv_cache_available_bytes": left + size}
    return Solution(value, f"{format_gib(size)} {what}", round(size), predicts=predicts)
