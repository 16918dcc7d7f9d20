"""What all ranks do after an attempt: start again with one plan, or none of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from oomguard.ranks.clock import Offset
from oomguard.ranks.documents import Decision, RankEnd
from oomguard.ranks.effects import why_not_repeated
from oomguard.ranks.first_cause import first_cause
from oomguard.ranks.one_plan import one_plan
from oomguard.ranks.permitted import why_not_permitted
from oomguard.supervise.refusals import OF_POLICY


def decide(
    number: int,
    ends: Mapping[int, RankEnd],
    offsets: Mapping[int, Offset | None],
    *,
    silent: Collection[int] = (),
    gone: Collection[int] = (),
    variables: Mapping[str, str] | None = None,
) -> Decision:
    """Decide on an attempt.

    Args:
        number: the attempt.
        ends: how the ranks ended that have said so.
        offsets: of their clocks to rank 0's.
        silent: the others.
        gone: those of them whose process was killed.
        variables: what every rank's command gets in its environment where they start again.
    """
    first = first_cause(ends, offsets)
    hows = {str(rank): end.how for rank, end in sorted(ends.items())}
    stopped = {str(rank): end.error for rank, end in sorted(ends.items()) if end.how == "stopped"}
    lost = tuple(sorted(set(silent) - set(map(int, stopped))))
    killed = tuple(sorted(set(gone) & set(lost)))
    decision = Decision(number, False, silent=lost, hows=hows, gone=killed, stopped=stopped)
    if first is not None:
        decision = replace(decision, first=first.rank, is_order_known=first.is_order_known)
    if decision.absent:
        return replace(decision, why=absent_in_words(decision))
    if first is None:
        return replace(decision, why="" if _all_ran(ends) else "no rank ran out of memory")
    decision = replace(decision, patches=one_plan(first.rank, ends))
    refusing = list(_refusing(ends, decision))
    if refusing:
        is_exhausted = bool(decision.patches) and all(refusal in OF_POLICY for _, refusal in refusing)
        return replace(decision, why=f"rank {refusing[0][0]}: {refusing[0][1]}", is_exhausted=is_exhausted)
    if not decision.patches:
        return replace(decision, why="nothing more to change by itself")
    return replace(decision, again=True, variables=variables or {})


def _refusing(ends: Mapping[int, RankEnd], decision: Decision) -> Iterator[tuple[int, str]]:
    """Yield each rank that lets none start again, with why: what it permits first, then what it can."""
    repeated = why_not_repeated(ends)
    for reasons in (why_not_permitted(decision.patches, ends), repeated):
        yield from sorted(reasons.items())
    yield from ((rank, end.refusal) for rank, end in sorted(ends.items()) if end.refusal is not None)


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return ``rank 2``, or ``ranks 0, 1 and 3``."""
    named = [str(rank) for rank in sorted(ranks)]
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named[:-1])} and {named[-1]}"


def absent_in_words(decision: Decision) -> str:
    """Return which ranks were stopped, and which did not say how the attempt ended, as far as it is known why."""
    quiet = set(decision.silent) - set(decision.gone)
    killed = "is gone, its process was killed" if len(decision.gone) == 1 else "are gone, their processes were killed"
    by_signal: dict[str, list[int]] = {}
    for rank, how in decision.stopped.items():
        by_signal.setdefault(how, []).append(int(rank))
    told = [
        f"{ranks_in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} ended by a signal ({how})"
        for how, ranks in by_signal.items()
    ]
    told += [f"{ranks_in_words(decision.gone)} {killed}"] if decision.gone else []
    told += [f"{ranks_in_words(quiet)} {'is' if len(quiet) == 1 else 'are'} silent"] if quiet else []
    return "; ".join(told)


def _all_ran(ends: Mapping[int, RankEnd]) -> bool:
    return all(end.how == "ran" for end in ends.values())
