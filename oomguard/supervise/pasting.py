"""The commands to paste after a failure: the user's own, with each solved patch and alternative applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.engines.started import StartedEngine, changes_with
from oomguard.facts import FactValue
from oomguard.incident import Incident
from oomguard.remedy.policy import is_out_of_question
from oomguard.settings import SETTINGS
from oomguard.surfaces import surface


def to_paste(launch: Launch, engine: Launcher, settings: Mapping[str, FactValue]) -> str:
    """Return a launch with these settings as a line to read and paste, without what only this run needs."""
    from oomguard.report.mask import mask_command

    return engine.shown(replace(launch, argv=tuple(mask_command(launch.argv, keep_homes=True)), env={}), settings)


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
    from oomguard.report.mask import mask_command

    first = replace(launch, argv=tuple(mask_command(launch.argv, keep_homes=True)), env={})
    solved = {patch.setting: patch.new for patch in incident.plan if not is_out_of_question(patch)}
    solved |= {f"alternative:{other.setting}": other.new for other in incident.alternatives}
    groups = {
        patch.setting: {p.setting: p.new for p in incident.plan if p.group == patch.group and p.new is not None}
        for patch in incident.plan
        if patch.group is not None
    }
    commands = {}
    for key, value in solved.items():
        if value is None:
            continue
        new = {**groups.get(key, {}), key.removeprefix("alternative:"): value}
        if all(_has(engine, name, launch) for name in new):
            meant = replace(first, engine_changes=changes_with(first.engine_changes, incident, started, new))
            commands[key] = engine.shown(meant, {**changed, **new})
    return commands


def _has(engine: Launcher, name: str, launch: Launch) -> bool:
    """Return whether the engine has a setting, in the version of this launch."""
    own = surface(name, engine.NAME, launch.engine_version)
    return engine.carries(name) and bool(own.flags or own.kwarg or SETTINGS[name].env)
