"""Carrying patches to vLLM: by flags where the command is vLLM's own, else through the plugin in the child."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from oomguard._version import __version__
from oomguard.engines import vllm_plugin
from oomguard.engines.command import Launch, gives_config_file, is_vllm_command, settings_given, with_flag
from oomguard.facts import FactValue
from oomguard.incident import SettingInForce
from oomguard.remedy.settings import SETTINGS

PLUGIN_MODULE: Final = "oomguard_vllm_plugin"


def settings_in_force(launch: Launch) -> dict[str, SettingInForce]:
    """The settings that the launch itself gives: its flags, and the overrides of earlier patches."""
    found = settings_given(launch.argv) if is_vllm_command(launch.argv) else {}
    if gives_config_file(launch.argv):
        found = {name: replace(setting, source="given") for name, setting in found.items()}
    return found


def carries(name: str) -> bool:
    """Whether a setting is one of vLLM's, so that a flag or the plugin can change it."""
    return SETTINGS[name].flag is not None and SETTINGS[name].kwarg is not None


def apply(launch: Launch, settings: Mapping[str, FactValue], session: Path) -> Launch:
    """The launch with these settings: as flags on vLLM's own command, else as overrides for the plugin.

    ``session`` is a folder of this run; the plugin is put there for children whose Python has no oomguard of its own.
    """
    if is_vllm_command(launch.argv):
        for name, value in settings.items():
            launch = with_flag(launch, name, value)
        return launch
    overrides = {SETTINGS[name].kwarg: value for name, value in settings.items() if SETTINGS[name].kwarg}
    env = dict(launch.env)
    env[vllm_plugin.OVERRIDES] = json.dumps(overrides)
    env[vllm_plugin.ACKNOWLEDGE] = str(session / "acknowledged.jsonl")
    env["PYTHONPATH"] = os.pathsep.join([str(_carry(session)), *filter(None, [os.environ.get("PYTHONPATH")])])
    if "VLLM_PLUGINS" in os.environ:  # an allow-list: joined where the user has one, never made
        names = [name for name in os.environ["VLLM_PLUGINS"].split(",") if name]
        env["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*names, "oomguard"]))
    return replace(launch, env=env)


def shown(launch: Launch, settings: Mapping[str, FactValue]) -> str:
    """A line to paste that runs the launch with these settings, without oomguard run around it."""
    if is_vllm_command(launch.argv):
        for name, value in settings.items():
            launch = with_flag(launch, name, value)
        return launch.shell()
    overrides = {SETTINGS[name].kwarg: value for name, value in settings.items() if SETTINGS[name].kwarg}
    if not overrides:
        return launch.shell()
    return Launch(launch.argv, {vllm_plugin.OVERRIDES: json.dumps(overrides)}).shell()


def acknowledged(session: Path) -> bool:
    """Whether the plugin in a child reported that overrides arrived."""
    return (session / "acknowledged.jsonl").exists()


def _carry(session: Path) -> Path:
    """A folder for PYTHONPATH that holds the plugin and the metadata of its entry point, and nothing else."""
    folder = session / "plugin"
    if not folder.exists():
        info = folder / f"{PLUGIN_MODULE}-{__version__}.dist-info"
        info.mkdir(parents=True)
        shutil.copyfile(vllm_plugin.__file__, folder / f"{PLUGIN_MODULE}.py")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {PLUGIN_MODULE}\nVersion: {__version__}\n", encoding="utf-8"
        )
        (info / "entry_points.txt").write_text(
            f"[vllm.general_plugins]\noomguard = {PLUGIN_MODULE}:register\n", encoding="utf-8"
        )
    return folder
