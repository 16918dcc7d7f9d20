"""A request that an engine refuses since the guard gave it less: the exception says whose change that was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oomguard.engines.known import insight_of, launchers
from oomguard.facts import FactValue
from oomguard.incident import Attempt


def explain_refusal(error: BaseException, attempts: Sequence[Attempt]) -> bool:
    """Add to an exception that tells of a refused request what was changed at the engine's start, and return whether it is one."""
    note = refusal_note(error, attempts)
    if note is not None:
        error.add_note(note)
    return note is not None


def refusal_note(error: BaseException, attempts: Sequence[Attempt]) -> str | None:
    """Return the note of an exception that tells of a refused request; None where no change of ours is behind it.

    Args:
        error: what left the guard.
        attempts: those of the guard; the first patch of a setting has the program's own value, the last one that in force.
    """
    patches = [patch for attempt in attempts for patch in attempt.patches if patch.new is not None]
    own: dict[str, FactValue | None] = {patch.setting: patch.old for patch in reversed(patches)}
    in_force = {patch.setting: patch.new for patch in patches if patch.new is not None}
    for engine in launchers():
        for name, need in insight_of(engine).refused_length(str(error), in_force).items():
            before = own[name]
            if isinstance(before, (int, float)) and math.isfinite(need.value) and need.value > before:
                return None  # the program's own value would not have done either
            least = before if math.isinf(need.value) else int(need.value)
            floor = "" if least is None else f"; with floors={{{name!r}: {least}}} the guard starts no engine below it"
            was = "" if before is None else f", not {before}"
            return (
                f"oomguard: {name} is {in_force[name]}{was}, since the engine ran out of memory with more; "
                f"{need.why} {'more' if least is None else least}{floor}"
            )
    return None
