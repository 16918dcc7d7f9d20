"""Pages of a KV cache that are small enough: each running request takes a whole one where its last is full."""

from __future__ import annotations

from typing import Final

from oomguard.incident import Incident
from oomguard.remedy.solution import Solution

_BACKENDS: Final = "which attention backend runs is not printed, and some take one page size only"


def page_for_requests(incident: Incident) -> Solution:
    """Take the largest power of two with which each request of a step of decoding gets a page of what was free."""
    free, needed = incident.number("kv_slots_free_tokens"), incident.number("kv_slots_needed_tokens")
    now = incident.number("block_size_tokens")
    if incident.phase != "decode" or free is None or not needed:
        missing = "how many requests needed a page: not printed"
        return Solution(None, f"smaller pages leave fewer tokens unused ({missing})", unknown=(missing,))
    each = int(free / needed)
    value = 1 << (each.bit_length() - 1) if each else 0
    if not value or (now is not None and value >= now):
        return Solution(None, f"{free:g} tokens are free for {needed:g} requests: pages are not what is missing")
    return Solution(value, f"{needed:g} requests each take a page of {free:g} free tokens", blocked_by=_BACKENDS)
