"""How many requests a pool of KV cache holds, at their full length or by those that filled it, and a table of requests by its places."""

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


def requests_in_table(incident: Incident) -> Solution:
    """Take no more requests than the engine's table of requests has places: by what may run, else by what runs and what is free.

    Ranks that take requests of their own share the places (sglang/srt/mem_cache/kv_cache_configurator.py resolve_max_num_reqs, 0.5.23):
    where all of a rank's were free, the table itself is too small, and more requests are what makes it larger.
    """
    free, needed = incident.number("request_slots_free"), incident.number("request_slots_needed")
    most, running = incident.number("max_num_seqs"), incident.number("running_requests")
    if free is None or needed is None:
        missing = "the places that were free and asked for: not printed"
        return Solution(None, f"needs fewer places; by how much is not known ({missing})", unknown=(missing,))
    ranks = incident.number("data_parallel_size") or 1
    if free >= needed:
        return Solution(None, f"{free:g} places were free for {needed:g} requests: another pool is full")
    if most is not None and most > needed - free:
        return _of_all_places(most, free, needed, ranks)
    if running is not None:
        return Solution(math.floor(running + free), f"{running:g} requests ran and {free:g} places were free")
    if free >= _OF_RUNNING * needed:
        return Solution(math.floor(free), f"{free:g} places are free at least for {needed:g} requests")
    missing = "how many requests may run (max_running_requests), or how many ran: not printed"
    return Solution(None, f"needs fewer places; by how much is not known ({missing})", unknown=(missing,))


def _of_all_places(most: float, free: float, needed: float, ranks: float) -> Solution:
    """Return how many requests may run by how many may now; more of them where all of a rank's places were free."""
    if ranks > 1 and free == most // ranks:
        reason = f"each of {ranks:g} ranks has {free:g} of {most:g} places, and a batch of one takes {needed:g}"
        return Solution(math.floor(needed * ranks), reason)
    return Solution(math.floor(most - needed + free), f"{needed:g} places were asked for, {free:g} were free")
