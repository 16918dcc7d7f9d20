"""Tell a failure of memory: the event, the diagnosis with commands to paste, the places of the settings; and whether our change arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from oomguard.attempting.ledger import Ledger
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Insight
from oomguard.incident import Diagnosis, Incident
from oomguard.log import get_logger
from oomguard.supervise.by_variable import WithVariables
from oomguard.supervise.in_force import tell_unheeded
from oomguard.supervise.job_files import tell_places
from oomguard.supervise.pasting import commands_to_paste


def tell_failure(
    diagnosis: Diagnosis,
    incident: Incident,
    launches: tuple[Launch, Launch],
    engine: tuple[WithVariables, Insight],
    ledger: Ledger,
    folder: Path,
    on_failure: Callable[[Diagnosis, dict[str, str]], None],
    *,
    was_refused: bool,
) -> tuple[bool, Mapping[str, str]]:
    """Tell what the attempt that ended last failed of; return whether its changes took effect, and the commands to paste by setting.

    Args:
        diagnosis: of the attempt.
        incident: what it failed of.
        launches: the command as it was first, and as the attempt ran it.
        engine: what the command starts, and what is known of it.
        ledger: the attempts.
        folder: of this run, where the engine tells which change it took.
        on_failure: shows the diagnosis with its commands.
        was_refused: whether a request was refused for our own change.
    """
    log, (first, launch), (launcher, insight) = get_logger(), launches, engine
    log.warning(
        "planned again" if was_refused else "out of memory" if incident.is_oom else "failed",
        kind=incident.kind,
        what=incident.headline,
        cause=incident.causes[0].id,
    )
    heeded = not ledger.settings or launcher.took_effect(launch, folder)
    if not heeded:
        log.warning("the change did not reach the engine: no engine in the command's Python took it")
    elif not was_refused:
        heeded = not tell_unheeded(ledger.attempts[-1], incident, launcher, launch)
    reached = ledger.settings if heeded else {}
    commands = commands_to_paste(first, launcher, reached, incident, insight.started(launch))
    on_failure(diagnosis, commands)
    tell_places(first.argv, incident)
    return heeded, commands
