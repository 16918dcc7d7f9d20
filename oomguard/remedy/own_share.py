"""The share for weights and KV pool that an engine takes itself where the user gives none, from the engine's own data file.

Where no figure tells what a failed start or step lacks, a share on the wrong side of it is moved there: it is what the engine's authors
keep for activations and graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomguard.incident import Incident
from oomguard.surfaces import engines, table_of

_TABLE: Final = "own_share"
_MORE_RANKS: Final = 4


def _known(incident: Incident) -> Mapping[str, Any]:
    """Return the failed engine's table; where the text names no engine, the one of those that know such a share."""
    if incident.framework in engines():
        return table_of(incident.framework, _TABLE)
    return next((table for engine in engines() if (table := table_of(engine, _TABLE))), {})


def own_share_ratio(incident: Incident) -> float | None:
    """Return the share by the device's size, else by the number of ranks; None for an engine whose data file has none."""
    known = _known(incident)
    if not known:
        return None
    total = incident.number("device_total_bytes") or incident.number("initial_free_bytes")
    if total:
        return max(0.0, 1 - kept_bytes(incident, total) / total)
    ranks = incident.number("tensor_parallel_size") or 1
    return next((float(row["share"]) for row in known["by_ranks"] if ranks >= row["ranks"]), None)


def kept_bytes(incident: Incident, total_bytes: float) -> float:
    """Return what the engine keeps of a device for activations and graphs, by the settings that are known."""
    known = _known(incident)
    if not known:
        return 0.0
    size = next((row for row in known["by_size"] if total_bytes < row["below_bytes"]), known["by_size"][-1])
    ranks = incident.number("tensor_parallel_size") or 1
    tokens = max(incident.number("max_num_batched_tokens") or size["step_tokens"], known["least_step_tokens"])
    graphs = incident.number("cuda_graph_max_bs") or size["more_ranks" if ranks >= _MORE_RANKS else "few_ranks"]
    kept: float = known["own_bytes"] + tokens * known["token_bytes"] + graphs * known["graph_bytes"]
    kept += ranks * known["rank_bytes"] + graphs * _of_parallel_attention(incident, graphs, known)
    least = known["large_keeps_bytes"] if total_bytes > known["large_bytes"] else 0.0
    speculative = incident.facts.get("speculative")
    draft = known["draft_bytes"] if speculative is not None and speculative.value is True else 0.0
    return float(max(kept, least) + draft)


def _of_parallel_attention(incident: Incident, graphs: float, known: Mapping[str, Any]) -> float:
    """Return what the engine keeps more for a row of a graph where each rank of attention takes requests of its own."""
    flag, ranks = incident.facts.get("parallel_attention"), incident.number("data_parallel_size") or 1
    if flag is None or flag.value is not True or ranks <= 1:
        return 0.0
    large: float = known["dp_large_graph_bytes"] if graphs > known["dp_large_rows"] else 0.0
    return float(ranks * (known["dp_graph_bytes"] + large))
