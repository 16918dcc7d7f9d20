"""Whether every rank permits the plan of all: a pin or a floor of one rank holds, whichever rank failed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from oomguard.incident import Effect, Patch
from oomguard.ranks.documents import Decision, RankEnd
from oomguard.remedy.policy import YOU_SET_IT, Need, Policy


def policy_row(policy: Policy, chosen: Iterable[str] = ()) -> Mapping[str, Any]:
    """Return what a rank permits as its document has it, with the settings that its user ``chose``.

    All of that holds without a failure of its own.
    """
    return {
        "chosen": sorted(chosen),
        "allow": None if policy.allow is None else str(policy.allow),
        "pinned": sorted(policy.pinned),
        "minimum": dict(policy.minimum),
        "needed": {
            name: [None if math.isinf(need.value) else need.value, need.why] for name, need in policy.needed.items()
        },
    }


def why_not_permitted(patches: Iterable[Mapping[str, Any]], ends: Mapping[int, RankEnd]) -> dict[int, str]:
    """Return why ranks do not permit a plan, by rank, with the setting and its values."""
    from oomguard.journal.codec import patch_of

    plan, found = [patch_of(patch) for patch in patches], dict[int, str]()
    for rank, end in ends.items():
        policy = _policy(end.policy)
        for patch in plan:
            why = policy.holds(patch) or policy.forbids(patch) or _chosen(patch, policy, end)
            if why is not None and rank not in found:
                found[rank] = f"{_change(patch)} is not permitted: {why}"
    return found


def is_change_left(decision: Decision, ends: Mapping[int, RankEnd]) -> bool:
    """Return whether none starts again though all permit a change; with a rank that is absent, one that any of the others plans."""
    if decision.again:
        return False
    if decision.absent:
        return any(end.patches for end in ends.values())
    return bool(decision.patches) and not why_not_permitted(decision.patches, ends)


def _chosen(patch: Patch, policy: Policy, end: RankEnd) -> str | None:
    """Return that a rank's user set what is to be reduced; its own failure tells that better, where its own plan has the patch."""
    is_own = any(own.get("setting") == patch.setting for own in end.patches)
    if policy.allow is not None or patch.effect != Effect.REDUCES_CAPACITY or is_own:
        return None
    return YOU_SET_IT.format(patch.effect) if patch.setting in end.policy.get("chosen", ()) else None


def _policy(row: Mapping[str, Any]) -> Policy:
    allow = row.get("allow")
    needed = {
        name: Need(math.inf if value is None else value, why) for name, (value, why) in row.get("needed", {}).items()
    }
    return Policy(
        None if allow is None else Effect.parse(allow),
        frozenset(row.get("pinned", ())),
        row.get("minimum", {}),
        needed=needed,
    )


def _change(patch: Patch) -> str:
    from oomguard.report.wording import arrow

    return f"{patch.setting} {arrow(patch)}"
