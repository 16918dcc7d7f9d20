"""A request that an engine refuses since the guard started it with less: the exception says whose change that was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oomguard.engines.known import insight_of, launchers
from oomguard.incident import Attempt, Patch
from oomguard.report.wording import arrow


def refusal_note(error: BaseException, attempts: Sequence[Attempt]) -> str | None:
    """Return the note of an exception that tells of a refused request; None where no change of ours is behind it.

    Args:
        error: what left the guard.
        attempts: those of the guard; the last one that changed a setting has the value in force.
    """
    changed: dict[str, Patch] = {patch.setting: patch for attempt in attempts for patch in attempt.patches}
    values = {name: patch.new for name, patch in changed.items() if patch.new is not None}
    if not values:
        return None
    for engine in launchers():
        for name, need in insight_of(engine).refused_length(str(error), values).items():
            patch = changed[name]
            least = patch.old if need.value == math.inf else int(need.value)
            floor = (
                ""
                if least is None
                else f"\n  {need.why} {least}: with guard(floors={{{name!r}: {least}}}) no start goes below it"
            )
            return f"oomguard: {name} {arrow(patch)}, as the engine did not start otherwise ({patch.reason}){floor}"
    return None
