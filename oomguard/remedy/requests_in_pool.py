"""How many requests a pool of KV cache holds: as many as fit at their full length, else fewer than those that filled it."""

from __future__ import annotations

import math
from typing import Final

from oomguard.incident import Incident
from oomguard.remedy.solution import Solution

# Of those that filled the pool: requests grow until they end, so a few less than ran would fill it again.
_OF_RUNNING: Final = 0.75


def requests_in_pool(incident: Incident) -> Solution:
    """Take as many requests as fit at their full length; where that is not known, three in four of those that filled the pool."""
    capacity, length = incident.number("kv_cache_capacity_tokens"), incident.number("max_model_len_tokens")
    running = incident.number("running_requests")
    if running is None and incident.phase == "decode":  # a step of decoding asks for one token of each
        running = incident.number("kv_slots_needed_tokens") or incident.number("max_num_seqs")
    if running is not None and running >= 2:
        value = math.floor(running * _OF_RUNNING)
        return Solution(value, f"{running:g} requests at once filled the KV cache")
    if capacity and length and capacity >= length:
        value = math.floor(capacity / length)
        return Solution(value, f"{capacity:g} tokens hold {value} requests of {length:g}")
    missing = "how many requests ran when the KV cache was full: not printed"
    return Solution(
        None, f"fewer requests hold less of the KV cache; how many is not known ({missing})", unknown=(missing,)
    )
