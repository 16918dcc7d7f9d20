"""One plan for all ranks: what the first cause calls for, with the value that every rank which ran out of memory can live with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomguard.ranks.documents import RankEnd
from oomguard.settings import SETTINGS


def one_plan(first: int, ends: Mapping[int, RankEnd]) -> tuple[Mapping[str, Any], ...]:
    """Return the patches of the first cause, with those that other ranks need beside them, as the contract's objects.

    Of two values of one number the smaller one fits on both ranks: less of what is asked for, or no more of the device than either has
    free. Of other values that of the first cause counts.

    Args:
        first: the rank that failed first.
        ends: how each rank ended.
    """
    order = [first, *(rank for rank in sorted(ends) if rank != first and ends[rank].how == "memory")]
    found: dict[str, Mapping[str, Any]] = {}
    for rank in order if ends[first].patches else ():
        for patch in ends[rank].patches:
            name = str(patch.get("setting"))
            if name not in SETTINGS:
                continue
            known = found.get(name)
            if known is None or _is_tighter(patch.get("to"), known.get("to")):
                found[name] = patch if known is None else {**patch, "reason": f"rank {rank}: {patch.get('reason', '')}"}
    return tuple(found.values())


def _is_tighter(new: object, known: object) -> bool:
    both = [value for value in (new, known) if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return len(both) == 2 and both[0] < both[1]
