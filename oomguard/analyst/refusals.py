"""Explain why this rank's command cannot run again; used before all ranks decide.

Side effects are not considered here. Only all ranks together know whether the command or an
oomguard wrote a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from oomguard.analyst.restart_gate import cannot_make
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.retry.ledger import Ledger

# Reasons of the policy alone: if a scheduler starts the job again, the change can be made.
NO_RELAUNCH: Final = "the limit of attempts is reached"
NO_TIME: Final = "its --deadline has passed"
OF_POLICY: Final = frozenset({NO_RELAUNCH, NO_TIME})


def refusal_of(
    number: int, ledger: Ledger, lost_input: str | None, folder: Path, *, dry_run: bool
) -> str | None:
    """Return why a command cannot run again after an attempt; None if it can.

    Args:
        number: the attempt that has ended.
        ledger: the earlier attempts, with the policy.
        lost_input: why it would miss its standard input; None if it would not.
        folder: the temporary folder, which a change may need.
        dry_run: whether this is a dry run.
    """
    if dry_run:
        return "this is a dry run"
    if number >= ledger.policy.max_attempts:
        return NO_RELAUNCH
    if ledger.time_left_s() <= 0:
        return NO_TIME
    if lost_input is not None:
        return f"the command would not get the same standard input: {lost_input}"
    if (missing := cannot_make(folder)) is not None:
        return f"oomguard could not create its temporary folder: {missing}"
    return None


def chosen_in(engine: Launcher, first: Launch) -> tuple[str, ...]:
    """Return the settings in the user's command, before any change of ours."""
    return tuple(
        name for name, found in engine.settings_in_force(first).items() if found.set_by_user
    )
