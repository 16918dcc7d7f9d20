"""Tell a failure of memory: the event, the diagnosis with commands to paste, the places of the
settings; and whether our change arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from oomguard.analyst.effective_settings import tell_places, tell_unheeded
from oomguard.analyst.environment_settings import WithVariables
from oomguard.core.facts import FactValue
from oomguard.core.incident import Diagnosis, Incident
from oomguard.core.log import get_logger
from oomguard.core.setting_spellings import surface
from oomguard.core.settings import SETTINGS
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Insight, Launcher
from oomguard.engines.started_engine import StartedEngine, changes_with
from oomguard.remedy.policy import is_out_of_question
from oomguard.retry.ledger import Ledger

# The commands to paste after a failure: the user's own, with each solved patch and alternative
# applied.


def to_paste(launch: Launch, engine: Launcher, settings: Mapping[str, FactValue]) -> str:
    """Return a launch with these settings as a line to read and paste, without what only this run
    needs.
    """
    from oomguard.report.redact import mask_command

    return engine.shown(
        replace(launch, argv=tuple(mask_command(launch.argv, keep_homes=True)), env={}), settings
    )


def commands_to_paste(
    launch: Launch,
    engine: Launcher,
    changed: Mapping[str, FactValue],
    incident: Incident,
    started: Sequence[StartedEngine],
) -> dict[str, str]:
    """Return the full command with each solved patch and alternative applied, its secrets masked.

    Args:
        launch: the command as the user gave it.
        engine: how it is started.
        changed: what was changed so far.
        incident: the failure, planned for; what is pinned in it is no command.
        started: the engines that the command started, as far as they were told.
    """
    from oomguard.report.redact import mask_command

    first = replace(launch, argv=tuple(mask_command(launch.argv, keep_homes=True)), env={})
    solved = {patch.setting: patch.new for patch in incident.plan if not is_out_of_question(patch)}
    solved |= {f"alternative:{other.setting}": other.new for other in incident.alternatives}
    groups = {
        patch.setting: {
            p.setting: p.new for p in incident.plan if p.group == patch.group and p.new is not None
        }
        for patch in incident.plan
        if patch.group is not None
    }
    commands = {}
    for key, value in solved.items():
        if value is None:
            continue
        new = {**groups.get(key, {}), key.removeprefix("alternative:"): value}
        if all(_has(engine, name, launch) for name in new):
            meant = replace(
                first, engine_changes=changes_with(first.engine_changes, incident, started, new)
            )
            commands[key] = engine.shown(meant, {**changed, **new})
    return commands


def _has(engine: Launcher, name: str, launch: Launch) -> bool:
    """Return whether the engine has a setting, in the version of this launch."""
    own = surface(name, engine.NAME, launch.engine_version)
    return engine.carries(name) and bool(own.flags or own.kwarg or SETTINGS[name].env)


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
    """Tell what the attempt that ended last failed of; return whether its changes took effect, and
    the commands to paste by setting.

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
    log = get_logger()
    (first, launch) = launches
    (launcher, insight) = engine
    log.warning(
        "planned again" if was_refused else "out of memory" if incident.is_oom else "failed",
        kind=incident.kind,
        what=incident.headline,
        cause=incident.causes[0].id,
    )
    heeded = not ledger.settings or launcher.took_effect(launch, folder)
    if not heeded:
        log.warning(
            "the change did not reach the engine: no engine in the command's Python took it"
        )
    elif not was_refused:
        heeded = not tell_unheeded(ledger.attempts[-1], incident, launcher, launch)
    if heeded:
        reached = ledger.settings
    else:
        reached = {}
    commands = commands_to_paste(first, launcher, reached, incident, insight.started(launch))
    on_failure(diagnosis, commands)
    tell_places(first.argv, incident)
    return heeded, commands
