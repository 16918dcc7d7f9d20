"""A share for weights and KV pool together (SGLang's ``mem_fraction_static``): what is outside it is for activations and graphs.

The pool gets free_after_load - free_before_load * (1 - share): sglang/srt/model_executor/model_runner.py profile_max_num_token,
0.2 to 0.5.23. So the least share is what the weights take of what was free, and a lower one makes a pool that is too small worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from oomguard.facts import GIB, MIB, format_gib
from oomguard.incident import Incident
from oomguard.memory.ceilings import others_margin_ratio
from oomguard.remedy.printed import Solver, rounded
from oomguard.remedy.solution import Solution

# What SGLang itself keeps for activations and graphs where the user gives no share (server_args.py, 0.5.4 to 0.5.23).
_OWN_BYTES: Final = 512 * MIB
_TOKEN_BYTES: Final = 1.5 * MIB
_LEAST_STEP_TOKENS: Final = 2048
_LARGE_DEVICE_BYTES: Final = 60 * GIB
_LARGE_DEVICE_KEEPS_BYTES: Final = 10 * GIB
# A pool that is worth a start: so much of what was free.
_POOL_RATIO: Final = 0.02
_HIGHEST: Final = 0.97


def static_share_for_pool(incident: Incident) -> Solution:
    """Raise the share of weights and pool to all but what the engine itself keeps for activations, above what the weights take."""
    before, least = incident.number("initial_free_bytes"), incident.number("static_share_least_ratio")
    now = incident.number("mem_fraction_static_ratio")
    if least is None:
        missing = "what is free before and after loading the weights: not printed"
        return Solution(None, f"leaves room for the KV cache; by how much is not known ({missing})", unknown=(missing,))
    kept = _kept_bytes(incident, before) if before else 0.0
    wished = _HIGHEST if not before else min(_HIGHEST, 1 - kept / before)
    value = max(rounded(math.floor, wished), rounded(math.ceil, least + _POOL_RATIO))
    if value > _HIGHEST or (now is not None and value <= now):
        return Solution(None, f"the weights take {least:.3f} of what was free: no share leaves activations their room")
    pool = {} if before is None else {"kv_cache_available_bytes": before * (value - least)}
    return Solution(value, f"the weights alone take {least:.3f} of what was free before them", predicts=pool)


def static_share_for_tried(incident: Incident) -> Solution:
    """Lower the share of weights and pool so that a failed allocation beside them fits: by (tried - free + margin) / total."""
    names = ("mem_fraction_static_ratio", "device_total_bytes", "tried_bytes", "device_free_bytes")
    share, total, tried, free = (incident.number(name) for name in names)
    if share is None or not total or tried is None or free is None:
        told = ("mem_fraction_static", "device total", "tried", "device free")
        values = (share, total, tried, free)
        missing = tuple(f"{name}: not printed" for name, value in zip(told, values, strict=True) if value is None)
        return Solution(
            None, f"makes room beside the pool; by how much is not known ({', '.join(missing)})", unknown=missing
        )
    lacking = max(0.0, tried - free) + others_margin_ratio() * total
    value, least = rounded(math.floor, share - lacking / total), incident.number("static_share_least_ratio") or 0.0
    if value <= max(0.0, least):
        return Solution(None, f"{format_gib(tried)} beside weights and pool does not fit in {format_gib(total)}")
    return Solution(
        value, f"{format_gib(lacking)} more is left beside weights and pool", round((share - value) * total)
    )


def _kept_bytes(incident: Incident, before: float) -> float:
    """Return what is kept for activations and graphs, by the settings that are known."""
    tokens = max(incident.number("max_num_batched_tokens") or _LEAST_STEP_TOKENS, _LEAST_STEP_TOKENS)
    ranks = incident.number("tensor_parallel_size") or 1
    kept = _OWN_BYTES + tokens * _TOKEN_BYTES + ranks / 8 * GIB
    return max(kept, _LARGE_DEVICE_KEEPS_BYTES) if before > _LARGE_DEVICE_BYTES else kept


STATIC_SHARE: Final[Mapping[str, Solver]] = {
    "static_share_for_pool": static_share_for_pool,
    "static_share_for_tried": static_share_for_tried,
}
