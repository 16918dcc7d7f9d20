"""Over how many devices a model's weights have to be shared: the fewest with room for a rank's weights and a KV cache."""

from __future__ import annotations

from typing import Final

from oomguard.facts import format_gib
from oomguard.incident import Incident
from oomguard.remedy.solution import Solution
from oomguard.remedy.value_checks import free_at_start

# What a rank needs besides its weights: activations and a KV cache, as a part of the weights.
_BESIDE_WEIGHTS_RATIO: Final = 0.05
# An engine takes this share of a device if nobody says otherwise.
_SHARE: Final = 0.9
_MOST_RANKS: Final = 64
_HOW_MANY: Final = "needs that many such devices, and the log does not show how many there are"
_LEVER: Final = "shares the weights among more devices"
_MISSING: Final = "the size of the weights, or of the device: not printed"


def ranks_for_weights(incident: Incident) -> Solution:
    """Share the weights among the fewest devices, by powers of two, that hold a rank's weights with a twentieth of them to spare.

    Heads and layers are divided evenly: a power of two divides those of nearly every model.
    """
    ranks = int(incident.number("tensor_parallel_size") or 1)
    of_rank = incident.number("model_weights_bytes") or incident.number("estimated_weights_bytes")
    total, free = incident.number("device_total_bytes"), free_at_start(incident)
    if not of_rank or not total:
        return Solution(None, f"{_LEVER}; by how much is not known ({_MISSING})", unknown=(_MISSING,))
    weights, room = of_rank * max(1, ranks), _SHARE * (total if free is None else min(total, free))
    more = 1
    while more <= ranks or weights / more * (1 + _BESIDE_WEIGHTS_RATIO) >= room:
        more *= 2
        if more > _MOST_RANKS:
            return Solution(None, f"{format_gib(weights)} of weights do not fit on {_MOST_RANKS} devices of this size")
    each = format_gib(weights / more)
    why = f"{format_gib(weights)} of weights over {more} devices are {each} on each, and {format_gib(room)} is usable there"
    return Solution(more, why, blocked_by=_HOW_MANY)
