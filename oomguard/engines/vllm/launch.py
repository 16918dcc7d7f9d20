"""Apply patches to vLLM: by flags in vLLM's own commands, otherwise through the plugin."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from oomguard.core.facts import FactValue
from oomguard.core.incident import EngineStart, SettingInForce
from oomguard.core.installation import __version__
from oomguard.core.settings import surface, surfaces
from oomguard.engines.command import Launch, settings_given
from oomguard.engines.vllm import plugin
from oomguard.engines.vllm.command import own_command, with_plugin, without_variables
from oomguard.engines.vllm.insight import started, with_acknowledgement, with_log_file
from oomguard.scan.context import SCRIPT

NAME: Final = "vllm"
SPEAKS: Final = ("vllm", "llm engine", "llmengine", "engine core", "enginecore")
_PLUGIN_MODULE: Final = "oomguard_vllm_plugin"


def is_own_command(argv: tuple[str, ...]) -> bool:
    """Return whether the command itself gives the engine its settings, also behind wrappers."""
    return own_command(argv) is not None


def settings_in_force(launch: Launch) -> dict[str, SettingInForce]:
    """Return the settings that the launch gives.

    The settings in a script's command line are only evidence: the script may ignore them.
    """
    own = own_command(launch.argv)
    if own is not None:
        return own.settings()
    found = settings_given(launch.argv, NAME)
    for name, flag in found.items():
        found[name] = replace(flag, source=SCRIPT)
    return found


def carries(name: str) -> bool:
    """Return whether vLLM has both a flag and an argument for a setting.

    Only then every kind of launch can be changed.
    """
    own = surfaces(NAME).get(name)
    return own is not None and bool(own.flags) and own.kwarg is not None


def apply(launch: Launch, settings: Mapping[str, FactValue], session: Path) -> Launch:
    """Return the launch with these settings: as flags, or as overrides for the plugin.

    Args:
        launch: the command as the user gave it.
        settings: the values to run with, by canonical name.
        session: a folder of this run. It holds a copy of the plugin for children whose Python has
            no oomguard, and a folder that exists only while the attempt runs.
    """
    launch = without_variables(launch, settings, os.environ)
    own = own_command(launch.argv)
    if own is not None:
        return replace(
            with_log_file(launch, session), argv=own.changed(settings, launch.engine_version)
        )
    env = dict(with_acknowledgement(launch, session).env)
    env[plugin.OVERRIDES] = json.dumps(_overrides(settings, launch.engine_version))
    if launch.engine_models:
        env[plugin.MODELS] = json.dumps(launch.engine_models)
    env |= _meant_for(launch)
    return with_plugin(launch, env, _carry(session), os.environ)


def shown(launch: Launch, settings: Mapping[str, FactValue]) -> str:
    """Return a shell line that runs the launch with these settings, without oomguard run."""
    launch = without_variables(launch, settings, os.environ)
    own = own_command(launch.argv)
    if own is not None:
        return replace(launch, argv=own.changed(settings, launch.engine_version)).shell()
    overrides = _overrides(settings, launch.engine_version)
    if not overrides:
        return Launch(launch.argv).shell()
    env = {plugin.OVERRIDES: json.dumps(overrides), **_meant_for(launch)}
    return with_plugin(replace(launch, env={}), env, None, os.environ).shell()


def took_effect(launch: Launch, session: Path) -> bool:
    """Return whether the settings of ``apply`` reached an engine.

    Flags always do. Overrides do if a plugin confirmed them.
    """
    return is_own_command(launch.argv) or any(engine.changed for engine in started(launch))


def reaches_scripts() -> bool:
    """Return True: the plugin changes the engine arguments of an unmodified script."""
    return True


def keep_measured(starts: tuple[EngineStart, ...], source: str, session: str) -> bool:
    """Store the measurements of a session's last start for later plans; False if it cannot.

    Raises:
        InputError: no start printed the size of its KV cache.
    """
    from oomguard.estimate.start.calibration import Calibrations, measured_start, store_measurement

    return store_measurement(measured_start(starts), source, Calibrations(), session)


def measured(sessions: Collection[str] | None, model: str | None = None) -> tuple[str, ...]:
    """Return the calibrations that these sessions stored, or those of a model, one line each.

    ``sessions`` None: of any session.
    """
    from oomguard.estimate.start.calibration import Calibrations, learned

    return learned(Calibrations(), sessions, model)


def forget_measured(sessions: Collection[str] | None, model: str | None = None) -> None:
    """Delete the calibrations that ``measured`` returns."""
    from oomguard.estimate.start.calibration import Calibrations, forget

    forget(Calibrations(), sessions, model)


def _meant_for(launch: Launch) -> dict[str, str]:
    """Return the variable that gives each of several engines its own change; empty for one."""
    changes = launch.engine_changes
    if len(changes) < 2 and all(change.order is None for change in changes):
        return {}
    rows = []
    for change in changes:
        overrides = _overrides(change.settings, launch.engine_version)
        rows.append({"model": change.model, "order": change.order, "overrides": overrides})
    return {plugin.ENGINES: json.dumps(rows)}


def _overrides(settings: Mapping[str, FactValue], version: str | None) -> dict[str, FactValue]:
    """Return the settings as arguments of this vLLM version, in vLLM's units."""
    overrides: dict[str, FactValue] = {}
    for name, value in settings.items():
        own = surface(name, NAME, version)
        if own.kwarg:
            overrides[own.kwarg] = own.to_engine(value)
    return overrides


def _carry(session: Path) -> Path:
    """Return a folder for PYTHONPATH with only the plugin and its entry-point metadata."""
    folder = session / "plugin"
    if not folder.exists():
        # vLLM finds the plugin by the metadata of an installed distribution, so that it has some.
        info = folder / f"{_PLUGIN_MODULE}-{__version__}.dist-info"
        info.mkdir(parents=True)
        shutil.copyfile(plugin.__file__, folder / f"{_PLUGIN_MODULE}.py")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {_PLUGIN_MODULE}\nVersion: {__version__}\n",
            encoding="utf-8",
        )
        (info / "entry_points.txt").write_text(
            f"[{plugin.GROUP}]\noomguard = {_PLUGIN_MODULE}:register\n", encoding="utf-8"
        )
    return folder
