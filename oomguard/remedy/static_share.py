"""A share for weights and KV pool together (SGLang's ``mem_fraction_static``): what is outside it is for activations and graphs.

The pool gets free_after_load - free_before_load * (1 - share): sglang/srt/model_executor/model_runner.py profile_max_num_token,
0.2 to 0.5.23. So the least share is what the weights take of what was free, and a lower one makes a pool that is too small worse.
"""

from __future__ import annotations

import math
from typing import Final

from oomguard.incident import Incident
from oomguard.remedy.own_share import kept_bytes, own_share_ratio
from oomguard.remedy.printed import rounded
from oomguard.remedy.solution import Solution

# A pool that is worth a start: so much of what was free.
_POOL_RATIO: Final = 0.02
_HIGHEST: Final = 0.97
# A share so much below the engine's own was set too low; one nearer to it fails for other reasons as likely.
_WELL_BELOW: Final = 0.05
# Where the weights take more than that allows: what is left must do for activations, on devices of 80 GB and more.
_HIGHEST_ABOVE_WEIGHTS: Final = 0.975


def static_share_for_pool(incident: Incident) -> Solution:
    """Raise the share of weights and pool to all but what the engine itself keeps for activations, above what the weights take."""
    before, least = incident.number("initial_free_bytes"), incident.number("static_share_least_ratio")
    now = incident.number("mem_fraction_static_ratio")
    if least is None:
        return _without_figures(incident, now)
    # Where that is not known, the least that holds a pool, as SGLang's own message advises.
    wished = min(_HIGHEST, 1 - kept_bytes(incident, before) / before) if before else 0.0
    value = max(rounded(math.floor, wished), rounded(math.ceil, least + _POOL_RATIO))
    if value > _HIGHEST_ABOVE_WEIGHTS or (now is not None and value <= now):
        return Solution(None, f"the weights take {least:.3f} of what was free: no share leaves activations their room")
    pool = {} if before is None else {"kv_cache_available_bytes": before * (value - least)}
    return Solution(value, f"the weights alone take {least:.3f} of what was free before them", predicts=pool)


def _without_figures(incident: Incident, now: float | None) -> Solution:
    """Return the engine's own share where the one in force is well below it, and what is missing of the figures either way."""
    missing = "what is free before and after loading the weights: not printed"
    own = own_share_ratio(incident)
    value = 0.0 if own is None else rounded(math.floor, own)
    weights, total = incident.number("estimated_weights_bytes"), incident.number("device_total_bytes")
    fits = not weights or not total or weights / total + _POOL_RATIO < value
    if now is not None and now <= value - _WELL_BELOW and fits:
        why = f"what the engine takes where no share is given; the least that would do is not known ({missing})"
        return Solution(value, why, unknown=(missing,))
    above = "" if now is None else f", above {now:g}"
    why = f"leaves room for the KV cache{above}; by how much is not known ({missing})"
    return Solution(None, why, unknown=(missing,))
