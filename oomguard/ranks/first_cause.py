"""Which rank failed first, whatever their clocks say.

A rank whose own message tells of memory failed before those that only lost their connection to it: that order is one of causes, and needs
no clock. Of several that ran out of memory, the first one counts where the difference is larger than what the clocks may be off; where
it is not, the one with least room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.ranks.clock import Offset
from oomguard.ranks.documents import RankEnd

# When a line was printed is known to a second.
PRINTED_SLACK_S: Final = 1.0
# What a failure prints of the room that there was, the most telling first.
_ROOM: Final = ("kv_cache_available_bytes", "device_free_bytes", "current_free_bytes")


@dataclass(frozen=True, slots=True)
class First:
    """The rank that failed first; ``is_order_known`` is False where several did and the clocks do not tell which."""

    rank: int
    is_order_known: bool


def first_cause(ends: Mapping[int, RankEnd], offsets: Mapping[int, Offset | None]) -> First | None:
    """Return which rank ran out of memory first; None where none did.

    Args:
        ends: how each rank ended.
        offsets: of each rank's clock to rank 0's; None: not known.
    """
    failed = {rank: end for rank, end in ends.items() if end.how == "memory"}
    if not failed:
        return None
    spans = {rank: _span(end, offsets.get(rank)) for rank, end in failed.items()}
    earliest_end_s = min(latest for _, latest in spans.values())
    may_be_first = [rank for rank, (earliest, _) in spans.items() if earliest <= earliest_end_s]
    rank = min(may_be_first, key=lambda rank: (not failed[rank].patches, _room(failed[rank].incident), rank))
    return First(rank, len(may_be_first) == 1)


def _span(end: RankEnd, offset: Offset | None) -> tuple[float, float]:
    """Return the earliest and the latest that a rank can have failed at, on rank 0's clock."""
    if end.failed_s is None or offset is None:
        return -math.inf, math.inf
    at_s, slack_s = end.failed_s + offset.offset_s, offset.slack_s + PRINTED_SLACK_S
    return at_s - slack_s, at_s + slack_s


def _room(incident: Mapping[str, Any] | None) -> float:
    """Return how much room a rank had; infinite where its failure does not tell."""
    facts = {} if incident is None else incident.get("facts", {})
    numbers = (facts.get(name) for name in _ROOM)
    return next((float(n) for n in numbers if isinstance(n, (int, float)) and not isinstance(n, bool)), math.inf)
