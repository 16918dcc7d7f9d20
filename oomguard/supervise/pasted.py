"""The commands that a run shows to be pasted: the user's own with values changed, and its secrets masked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.facts import FactValue
from oomguard.incident import Incident
from oomguard.remedy.policy import is_out_of_question
from oomguard.report.mask import mask_command


def to_paste(engine: Launcher, launch: Launch, settings: Mapping[str, FactValue]) -> str:
    """Return a launch with these settings as a line to read and paste, without what only this run needs."""
    return engine.shown(replace(launch, argv=tuple(mask_command(launch.argv)), env={}), settings)


def commands_to_paste(
    engine: Launcher, launch: Launch, settings: Mapping[str, FactValue], incident: Incident
) -> dict[str, str]:
    """Return the full command with each solved patch and alternative applied, by setting.

    Args:
        engine: what carries settings into the command.
        launch: the command as the user gave it.
        settings: the values changed so far.
        incident: the failure with its plan and alternatives.
    """
    solved = {patch.setting: patch.new for patch in incident.plan if not is_out_of_question(patch)}
    solved |= {f"alternative:{other.setting}": other.new for other in incident.alternatives}
    groups = {
        patch.setting: {p.setting: p.new for p in incident.plan if p.group == patch.group and p.new is not None}
        for patch in incident.plan
        if patch.group is not None
    }
    commands = {}
    for key, value in solved.items():
        name = key.removeprefix("alternative:")
        if value is not None and engine.carries(name):
            commands[key] = to_paste(engine, launch, {**settings, **groups.get(key, {}), name: value})
    return commands
