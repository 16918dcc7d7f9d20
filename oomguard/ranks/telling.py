"""What is told of a decision: the failure of the rank that failed first, what became of the others, and who was silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from oomguard.diagnosing import replanned
from oomguard.incident import Diagnosis, Incident, Patch
from oomguard.journal.codec import incident_of, patch_of
from oomguard.ranks.decision import absent_in_words, ranks_in_words
from oomguard.ranks.documents import Decision, RankEnd

_HOWS: Final = {
    "memory": "ran out of memory",
    "secondary": "lost the others",
    "ended": "ended by oomguard for it",
    "stopped": "ended by a signal",
    "other": "failed of something else",
    "ran": "ran",
}


def told(decision: Decision, ends: Mapping[int, RankEnd], own: Diagnosis, rank: int, size: int) -> Diagnosis:
    """Return what this rank tells after a decision: one incident, of the rank that failed first, and how each rank ended.

    Args:
        decision: of rank 0.
        ends: how each rank ended.
        own: what this rank's output tells.
        rank: this one.
        size: how many ranks there are.
    """
    if all(how == "ran" for how in decision.hows.values()) and not decision.absent:
        return own
    notes = (*(own.notes if decision.first in {None, rank} else ()), *_notes(decision, size))
    if decision.first is None:
        return replace(own, notes=notes)
    found = own.first_cause if decision.first == rank else None
    row = ends[decision.first].incident if decision.first in ends else None
    incident = found or (None if row is None else incident_of(row))
    if incident is None:
        return replace(own, notes=notes)
    others = [
        f"rank {other}" for other, how in decision.hows.items() if how == "memory" and other != str(decision.first)
    ]
    planned = replanned(incident, plan_of_all(incident.plan, decision))
    return replace(own, incidents=(_of_rank(planned, decision.first, others),), notes=notes)


def plan_of_all(own: Sequence[Patch], decision: Decision) -> tuple[Patch, ...]:
    """Return the plan of the rank that failed first, with what all ranks change in front: no less is enough for all."""
    of_all = [patch_of(patch) for patch in decision.patches]
    if len(of_all) > 1:  # none of them is enough alone
        group = 1 + max((patch.group for patch in own if patch.group is not None), default=0)
        of_all = [replace(patch, group=group) for patch in of_all]
    named = {patch.setting for patch in of_all}
    return (*of_all, *(patch for patch in own if patch.setting not in named))


def record(decision: Decision, size: int) -> dict[str, Any]:
    """Return a decision as the report has it, and as the journal keeps it with the incident."""
    return {
        "size": size,
        "first": decision.first,
        "first_is_known": decision.is_order_known,
        "ended": dict(decision.hows),
        "silent": list(decision.silent),
        "again": decision.again,
        "why_not": decision.why or None,
        "plan": [dict(patch) for patch in decision.patches],
    }


def _of_rank(incident: Incident, rank: int, others: list[str]) -> Incident:
    named = incident.location.process
    process = f"rank {rank}" if named is None else f"rank {rank}: {named}"
    return replace(incident, location=replace(incident.location, process=process), also_in=(*incident.also_in, *others))


def _notes(decision: Decision, size: int) -> tuple[str, ...]:
    by_how: dict[str, list[int]] = {}
    for rank, how in decision.hows.items():
        by_how.setdefault(how, []).append(int(rank))
    hows = "; ".join(f"{ranks_in_words(ranks)}: {_HOWS.get(how, how)}" for how, ranks in by_how.items())
    notes = [f"{size} ranks. {hows}"]
    if decision.first is not None:
        known = (
            ""
            if decision.is_order_known
            else " (their clocks do not tell the order: it had the least room, or the lowest number)"
        )
        notes.append(f"first: rank {decision.first}{known}")
    if decision.absent:
        notes.append(absent_in_words(decision))
    return tuple(notes)
