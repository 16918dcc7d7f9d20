"""How many CUDA graphs fit: as many of the smallest as were captured of the largest.

An engine captures the largest batch first, and a smaller one needs no more: where k graphs were captured before memory ran out, the k
smallest sizes fit in the same room (sglang/srt/model_executor/cuda_graph_runner.py capture, 0.4.6 to 0.5.23).
"""

from __future__ import annotations

from oomguard.facts import format_gib
from oomguard.incident import Incident
from oomguard.remedy.solution import Solution


def graphs_that_were_captured(incident: Incident) -> Solution:
    """Capture graphs up to the size at which as many are left as were captured when memory ran out."""
    done, wanted = incident.number("graphs_captured"), incident.number("graphs_wanted")
    listed = incident.facts.get("graph_sizes")
    sizes = sorted(int(size) for size in str(listed.value).split(",")) if listed is not None else []
    if done is None or not sizes or (wanted is not None and len(sizes) != wanted):
        missing = "the sizes and how many of them were captured: not printed"
        return Solution(None, f"captures fewer graphs; by how much is not known ({missing})", unknown=(missing,))
    if not done or done >= len(sizes):
        return Solution(None, f"{done:g} of {len(sizes)} graphs were captured: their sizes are not what is too large")
    free = incident.number("graphs_free_bytes")
    room = "" if free is None else f" in {format_gib(free)}"
    value = sizes[int(done) - 1]
    return Solution(value, f"{done:g} of {len(sizes)} graphs were captured{room}; so many of the smallest fit")
