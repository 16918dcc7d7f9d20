"""Why a command cannot be run again, or not as all would change it: asked by a rank before all
ranks decide.

What it did to the outside world is no part of this: who wrote a file, the command or an oomguard,
all ranks together know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from oomguard.analyst.restart_gate import cannot_make
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.retry.ledger import Ledger

# Of the policy alone: where a scheduler starts the job anew, the change can be made.
NO_RELAUNCH: Final = "no relaunch is left"
NO_TIME: Final = "its --deadline has passed"
OF_POLICY: Final = frozenset({NO_RELAUNCH, NO_TIME})


def refusal_of(
    number: int, ledger: Ledger, lost_input: str | None, folder: Path, *, dry_run: bool
) -> str | None:
    """Return why a command cannot be run again after an attempt; None where it may be.

    Args:
        number: the attempt that has ended.
        ledger: those before it, with the policy.
        lost_input: why it would not have the same standard input; None: it would.
        folder: a temporary one, which a change may need.
        dry_run: nothing is run again.
    """
    if dry_run:
        return "a dry run"
    if number > ledger.policy.max_relaunches:
        return NO_RELAUNCH
    if ledger.time_left_s() <= 0:
        return NO_TIME
    if lost_input is not None:
        return f"it would not have the same standard input: {lost_input}"
    if (missing := cannot_make(folder)) is not None:
        return f"it needs a temporary folder: {missing}"
    return None


def chosen_in(engine: Launcher, first: Launch) -> tuple[str, ...]:
    """Return the settings that the user gave a launch, by its words before any change of ours."""
    return tuple(
        name for name, found in engine.settings_in_force(first).items() if found.set_by_user
    )
