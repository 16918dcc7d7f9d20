"""A share for weights and KV pool together (SGLang's ``mem_fraction_static``): what is outside it is for activations and graphs.

The pool gets free_after_load - free_before_load * (1 - share): sglang/srt/model_executor/model_runner.py profile_max_num_token,
0.2 to 0.5.23. So the least share is what the weights take of what was free, and a lower one makes a pool that is too small worse.
"""

from __future__ import annotations

import math
from typing import Final

from oomguard.facts import GIB, MIB
from oomguard.incident import Incident
from oomguard.remedy.printed import rounded
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
# Where the weights take more than that allows: what is left must do for activations, on devices of 80 GB and more.
_HIGHEST_ABOVE_WEIGHTS: Final = 0.975


def static_share_for_pool(incident: Incident) -> Solution:
    """Raise the share of weights and pool to all but what the engine itself keeps for activations, above what the weights take."""
    before, least = incident.number("initial_free_bytes"), incident.number("static_share_least_ratio")
    now = incident.number("mem_fraction_static_ratio")
    if least is None:
        missing = "what is free before and after loading the weights: not printed"
        above = "" if now is None else f", above {now:g}"
        why = f"leaves room for the KV cache{above}; by how much is not known ({missing})"
        return Solution(None, why, unknown=(missing,))
    # Where that is not known, the least that holds a pool, as SGLang's own message advises.
    wished = min(_HIGHEST, 1 - _kept_bytes(incident, before) / before) if before else 0.0
    value = max(rounded(math.floor, wished), rounded(math.ceil, least + _POOL_RATIO))
    if value > _HIGHEST_ABOVE_WEIGHTS or (now is not None and value <= now):
        return Solution(None, f"the weights take {least:.3f} of what was free: no share leaves activations their room")
    pool = {} if before is None else {"kv_cache_available_bytes": before * (value - least)}
    return Solution(value, f"the weights alone take {least:.3f} of what was free before them", predicts=pool)


def _kept_bytes(incident: Incident, before: float) -> float:
    """Return what is kept for activations and graphs, by the settings that are known."""
    tokens = max(incident.number("max_num_batched_tokens") or _LEAST_STEP_TOKENS, _LEAST_STEP_TOKENS)
    ranks = incident.number("tensor_parallel_size") or 1
    kept = _OWN_BYTES + tokens * _TOKEN_BYTES + ranks / 8 * GIB
    return max(kept, _LARGE_DEVICE_KEEPS_BYTES) if before > _LARGE_DEVICE_BYTES else kept
