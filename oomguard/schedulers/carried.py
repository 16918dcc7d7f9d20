"""A job's changes from one start to the next: they stand in its comment, in front of what the comment says to people.

What the user made the comment stays, in front of all of ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from oomguard.facts import FactValue
from oomguard.incident import Effect, Incident, Patch
from oomguard.remedy.policy import Policy
from oomguard.settings import SETTINGS, effect_of
from oomguard.supervise.by_variable import DEVICE

_OWN: Final = "oomguard"
_MOST_STATE_BYTES: Final = 1000
_BETWEEN: Final = "; "
_OURS: Final = re.compile(rf"(?:^|{_BETWEEN}){_OWN}(?=: | \{{)")


def with_state(settings: Mapping[str, FactValue], text: str) -> str | None:
    """Return a comment with the changes in it; None where they are too long for one.

    Args:
        settings: all that was changed. Which device had room says nothing of the next start, so it is left out.
        text: for people, beginning with ``oomguard:``.
    """
    kept = {name: value for name, value in settings.items() if name != DEVICE}
    state = json.dumps(kept) if kept else ""
    if len(state.encode()) > _MOST_STATE_BYTES:
        return None
    return f"{_OWN} {state}{text.removeprefix(_OWN)}" if kept else text


def behind(comment: str, text: str) -> str:
    """Return a comment of ours behind what somebody else has made the comment; what we made it before goes."""
    ours = _OURS.search(comment)
    others = comment if ours is None else comment[: ours.start()]
    return f"{others}{_BETWEEN}{text}" if others else text


def is_ours(comment: str) -> bool:
    """Return whether a comment has words of ours in it."""
    return _OURS.search(comment) is not None


def state_in(comment: str) -> dict[str, FactValue]:
    """Return the changes in a comment, empty where it has none that this version knows."""
    ours = _OURS.search(comment)
    state = "" if ours is None else comment[ours.end() :].removeprefix(" ")
    try:
        found, end = json.JSONDecoder().raw_decode(state)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or not state[end:].startswith(":"):
        return {}
    return {
        name: value for name, value in found.items() if name in SETTINGS and isinstance(value, bool | int | float | str)
    }


def changes_of(
    settings: Mapping[str, FactValue], policy: Policy, reason: str
) -> tuple[tuple[Patch, ...], tuple[str, ...]]:
    """Return the changes to begin with, and why others are left out.

    The start before made them under its policy, which knew whose each setting was. What this one's words forbid is left out.
    """
    patches, refused = [], []
    for name, value in settings.items():
        patch = Patch(name, None, value, effect_of(name, None, value), reason)
        why = policy.blocks(patch, Incident("other", "", settings_complete=True))
        if policy.allow is None and patch.effect == Effect.CHANGES_OUTPUTS:
            why = f"changes outputs: --allow {patch.effect} permits it"
        if why is None:
            patches.append(patch)
        else:
            refused.append(f"{name}={value} ({why})")
    return tuple(patches), tuple(refused)
