"""What a start measured, kept for the plans to come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from oomguard.log import get_logger

if TYPE_CHECKING:
    from oomguard.engines.command import Launch
    from oomguard.incident import EngineStart
    from oomguard.observe.scan import Scanner
    from oomguard.supervise.by_variable import WithVariables
    from oomguard.supervise.heard import Heard
    from oomguard.supervise.keeping import Keeper


def last_start(heard: Heard | None, engine: WithVariables, launch: Launch) -> EngineStart | None:
    """Return what the last engine of an attempt told of itself; None where none spoke, or where it cannot be read."""
    if heard is None:
        return None
    try:
        starts = heard.scanner.diagnosis("", given=engine.settings_in_force(launch)).starts
    except Exception as error:  # noqa: BLE001 - as below
        get_logger().debug("what started is not known", reason=str(error))
        return None
    return starts[-1] if starts else None


def learn(scanner: Scanner, engine: WithVariables, launch: Launch, keeper: Keeper) -> None:
    """Keep what the engine measured while it started; go on where that cannot be done, or no journal is kept."""
    if keeper.path is None or "kv_cache_available_bytes" not in scanner.measured:
        return
    try:
        starts = scanner.diagnosis("", given=engine.settings_in_force(launch)).starts
        kept = engine.keep_measured(starts, f"oomguard run on {time.strftime('%Y-%m-%d')}", keeper.session)
        get_logger().debug("what the start measured", kept=kept)
    except Exception as error:  # noqa: BLE001 - whatever a log or a folder holds, the command's own end is not ours to change
        get_logger().debug("what the start measured is not kept", reason=str(error))
