"""What all ranks do after an attempt: start again with one plan, or none of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from oomguard.ranks.clock import Offset
from oomguard.ranks.documents import Decision, RankEnd
from oomguard.ranks.first_cause import first_cause
from oomguard.ranks.one_plan import one_plan


def decide(
    number: int,
    ends: Mapping[int, RankEnd],
    offsets: Mapping[int, Offset | None],
    *,
    silent: Collection[int] = (),
    variables: Mapping[str, str] | None = None,
) -> Decision:
    """Decide on an attempt.

    Args:
        number: the attempt.
        ends: how the ranks ended that have said so.
        offsets: of their clocks to rank 0's.
        silent: the others.
        variables: what every rank's command gets in its environment where they start again.
    """
    first = first_cause(ends, offsets)
    hows = {str(rank): end.how for rank, end in sorted(ends.items())}
    lost = tuple(sorted(silent))
    decision = Decision(number, False, silent=lost, hows=hows)
    if first is not None:
        decision = replace(decision, first=first.rank, is_order_known=first.is_order_known)
    if lost:
        return replace(decision, why=f"{ranks_in_words(lost)} did not say how the attempt ended")
    if first is None:
        return replace(decision, why="" if _all_ran(ends) else "no rank ran out of memory")
    decision = replace(decision, patches=one_plan(first.rank, ends))
    refusing = [(rank, end.refusal) for rank, end in sorted(ends.items()) if end.refusal is not None]
    if refusing:
        return replace(decision, why=f"rank {refusing[0][0]}: {refusing[0][1]}")
    if not decision.patches:
        return replace(decision, why="nothing more to change by itself")
    return replace(decision, again=True, variables=variables or {})


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return ``rank 2``, or ``ranks 0, 1 and 3``."""
    named = [str(rank) for rank in sorted(ranks)]
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named[:-1])} and {named[-1]}"


def _all_ran(ends: Mapping[int, RankEnd]) -> bool:
    return all(end.how == "ran" for end in ends.values())
