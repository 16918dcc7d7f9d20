"""A pool that leaves too little beside it: lowered, in whatever terms it is given, by what an allocation lacked."""

from __future__ import annotations

import math
from typing import Final

from oomguard.facts import MIB, format_gib
from oomguard.incident import Incident
from oomguard.memory.ceilings import others_margin_ratio
from oomguard.remedy.own_share import own_share_ratio
from oomguard.remedy.printed import rounded
from oomguard.remedy.solution import Solution
from oomguard.surfaces import default_value

# After a sampler's sort (12 bytes a logit) come a softmax and masks (6): vLLM 0.32, topk_topp_sampler.py apply_top_k_top_p_pytorch.
_LEAST_DEFAULT_UTILIZATION: Final = 0.9  # of all versions of vLLM
_LATER_IN_SAMPLER_RATIO: Final = 0.5
# With more of the device in other hands its size does not tell the engine's own share of what was free.
_OTHERS_RATIO: Final = 0.1
# Weights lie in the share too, mostly unprinted: half of it is the most that a pool gives back.
_GIVES_BACK_RATIO: Final = 0.5
# What is refused although so many times as much is free is refused for another reason (OG309).
_REFUSED_WITH_ROOM_RATIO: Final = 1.2


def _still_wanted(incident: Incident, tried_bytes: float) -> float:
    """Return what a failed allocation asked for and what would have come after it, as far as that is known."""
    return tried_bytes * (1 + _LATER_IN_SAMPLER_RATIO) if incident.kind == "sampler_warmup_oom" else tried_bytes


def lacking_beside(incident: Incident, fact: str, setting: str) -> tuple[float, tuple[str, ...]]:
    """Return what a failed allocation lacks beside a pool, and what is not printed of the figures that this takes.

    Args:
        incident: the failure.
        fact: the present size or share of the pool.
        setting: what that is called where it is not printed.
    """
    total, tried, free = (incident.number(n) for n in ("device_total_bytes", "tried_bytes", "device_free_bytes"))
    figures = {setting: incident.number(fact), "device total": total or None, "tried": tried, "device free": free}
    missing = tuple(f"{name}: not printed" for name, value in figures.items() if value is None)
    if not total or tried is None or free is None:
        return 0.0, missing
    return max(0.0, _still_wanted(incident, tried) - free) + others_margin_ratio() * total, missing


def utilization_for_tried(incident: Incident) -> Solution:
    """Lower the utilization so that a failed allocation beside vLLM's pool fits: by (tried - free + margin) / total."""
    lacking, missing = lacking_beside(incident, "gpu_memory_utilization_ratio", "gpu_memory_utilization")
    ratio, total = incident.number("gpu_memory_utilization_ratio"), incident.number("device_total_bytes")
    assumed = ""
    if missing == ("gpu_memory_utilization: not printed",) and incident.framework == "vllm":
        ratio, missing = _default_utilization(incident), ()
        assumed = f"; its present value is not shown, {ratio:g} is assumed"
    if missing or ratio is None or not total:
        why = f"makes room beside the KV pool; by how much is not known ({', '.join(missing)})"
        return Solution(None, why, unknown=missing)
    value = rounded(math.floor, ratio - lacking / total)
    if value <= 0:
        tried = format_gib(incident.number("tried_bytes") or 0)
        return Solution(None, f"{tried} beside the KV pool does not fit in {format_gib(total)}")
    reason = f"besides the KV pool at least {format_gib(lacking)} more is needed{assumed}"
    return Solution(value, reason, round((ratio - value) * total))


def _default_utilization(incident: Incident) -> float:
    """Return the version's default share, the least one of all versions if the version is not printed."""
    own = default_value("gpu_memory_utilization", "vllm", incident.framework_version)
    return float(own) if isinstance(own, (int, float)) else _LEAST_DEFAULT_UTILIZATION


def kv_bytes_for_tried(incident: Incident) -> Solution:
    """Lower ``kv_cache_memory_bytes`` so that a failed allocation beside the KV cache fits: by tried - free + margin."""
    lacking, missing = lacking_beside(incident, "kv_cache_memory_bytes", "kv_cache_memory_bytes")
    pool = incident.number("kv_cache_memory_bytes")
    if missing or pool is None:
        return Solution(None, f"by how much is not known ({', '.join(missing)})", unknown=missing)
    value = int((pool - lacking) // MIB * MIB)
    if value <= 0:
        return Solution(None, f"{format_gib(incident.number('tried_bytes') or 0)} does not fit beside any KV cache")
    return Solution(value, f"besides the KV cache at least {format_gib(lacking)} more is needed", round(pool - value))


def static_share_for_tried(incident: Incident) -> Solution:
    """Lower the share of weights and pool so that a failed allocation beside them fits: by (tried - free + margin) / total.

    Where the share is not printed, a capture of graphs tells it: what is allocated by then is weights, pool and the graphs' own
    pools; else it is the engine's own, where the command is shown and has none. Where graphs were counted while they were captured,
    those that were left need no more each.
    """
    lacking, missing = lacking_beside(incident, "mem_fraction_static_ratio", "mem_fraction_static")
    share, total = incident.number("mem_fraction_static_ratio"), incident.number("device_total_bytes")
    of_graphs = _lacking_for_graphs(incident)
    if of_graphs is not None:
        total = total or incident.number("initial_free_bytes")
        lacking = max(lacking, of_graphs + others_margin_ratio() * (total or 0.0))
        missing = tuple(name for name in missing if name.startswith("mem_fraction_static") or not total)
    seen = None if share is not None else _share_in_force(incident)
    if seen is not None and missing == ("mem_fraction_static: not printed",):
        share, missing = seen[0], ()
    least = incident.number("static_share_least_ratio") or 0.0
    tried, free = incident.number("tried_bytes"), incident.number("device_free_bytes")
    if of_graphs is None and tried is not None and free is not None and free > _REFUSED_WITH_ROOM_RATIO * tried:
        return Solution(None, f"{format_gib(free)} was free for {format_gib(tried)}: the share is not what lacks")
    assumed = ""
    is_default = missing == ("mem_fraction_static: not printed",) and incident.framework == "sglang"
    if is_default and (own := own_share_ratio(incident)) is not None:
        share, missing, assumed = own, (), f"; its present value is not shown, {own:.3f} is assumed"
    if missing or share is None or not total:
        return _own_share(incident, share, least, missing)
    value = rounded(math.floor, share - lacking / total)
    if value <= max(share * _GIVES_BACK_RATIO, least):
        what = "the graphs" if of_graphs is not None else format_gib(incident.number("tried_bytes") or 0)
        return Solution(None, f"{what} beside weights and pool does not fit in {format_gib(total)}")
    freed = round((share - value) * total)
    now = assumed if seen is None else f"; {seen[1].format(seen[0])}"
    return Solution(value, f"besides weights and pool at least {format_gib(lacking)} more is needed{now}", freed)


def _lacking_for_graphs(incident: Incident) -> float | None:
    """Return what the graphs that were left when memory ran out need at most, by what those before them took; None if not counted."""
    done, wanted, free = (incident.number(name) for name in ("graphs_captured", "graphs_wanted", "graphs_free_bytes"))
    if incident.phase != "cudagraph_capture" or not done or wanted is None or free is None or wanted <= done:
        return None
    return free * (wanted / done - 1)


def _own_share(incident: Incident, share: float | None, least: float, missing: tuple[str, ...]) -> Solution:
    """Return the engine's own share where the one in force is above it, and what is missing of the figures either way."""
    own = own_share_ratio(incident)
    value = None if own is None else rounded(math.floor, own)
    if value is not None and share is not None and least < value < share:
        why = (
            f"what the engine takes where no share is given; what the failure lacks is not known ({', '.join(missing)})"
        )
        return Solution(value, why, unknown=missing)
    why = f"makes room beside the pool; by how much is not known ({', '.join(missing)})"
    return Solution(None, why, unknown=missing)


def _share_in_force(incident: Incident) -> tuple[float, str] | None:
    """Return a share that is not printed, and how it is told; None where nothing tells it.

    The pool got free_after_load - free_before_load * (1 - share) (remedy/static_share.py), unless a number of tokens limits it. While
    graphs are captured what is allocated is weights, pool and the graphs' own pools.
    """
    names = ("initial_free_bytes", "loaded_free_bytes", "kv_cache_available_bytes")
    before, loaded, pool = (incident.number(name) for name in names)
    if before and loaded is not None and pool and pool < loaded and "max_total_tokens" not in incident.facts:
        return 1 - (loaded - pool) / before, "{:.3f} of what was free went to weights and pool"
    allocated, total = incident.number("allocated_bytes"), incident.number("device_total_bytes")
    if incident.phase == "cudagraph_capture" and allocated is not None and total:
        held = (allocated - (incident.number("private_pool_bytes") or 0)) / total
        return held, "{:.3f} of the device is allocated by the time of the capture"
    own, others = own_share_ratio(incident), incident.number("others_ratio") or 0.0
    if "launch_shown" not in incident.facts or own is None or not total or others > _OTHERS_RATIO:
        return None
    return own, "no share is given, and {:.3f} is what the engine takes of such a device itself"
