"""Change the environment of a command that starts vLLM.

Variables may set the same things as flags, and variables carry the plugin. A wrapper in the command
(``env``, a shell's text) may override our variables; then ours are set behind that wrapper.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import SettingInForce
from oomguard.core.settings import surface
from oomguard.engines.command import Launch
from oomguard.engines.unwrap_command import InnerCommand, inner_commands

_NAME: Final = "vllm"
_ALLOWED: Final = "VLLM_PLUGINS"
_PATH: Final = "PYTHONPATH"
_PLUGIN: Final = "oomguard"


def set_by_variable(
    launch: Launch, name: str, facts: Mapping[str, Fact], environ: Mapping[str, str]
) -> SettingInForce | None:
    """Return a setting that a variable sets over its flag on this device; None without one."""
    for row in surface(name, _NAME).variables:
        where = facts.get(row["where"])
        text = _value(launch, row["name"], environ)
        if text is None or where is None or not where.value:
            continue
        try:
            value: FactValue | None = int(text) * row["unit_bytes"]
        except ValueError:
            value = None  # the engine itself rejects it
        return SettingInForce(name, value, True, f"{row['name']}={text}")
    return None


def without_variables(
    launch: Launch, settings: Mapping[str, FactValue], environ: Mapping[str, str]
) -> Launch:
    """Return the launch without the variables that would override the given settings.

    A variable that an earlier command of a shell's text exports stays. oomguard then reports that
    it overrides the change.
    """
    names = [row["name"] for name in settings for row in surface(name, _NAME).variables]
    launch = functools.reduce(_without_assignments, names, launch)
    unset = [n for n in names if environ.get(n) and not _sets_by_itself(launch, n)]
    words = [word for name in unset for word in ("-u", name)]
    if words:
        return replace(launch, argv=("env", *words, *launch.argv))
    return launch


def _without_assignments(launch: Launch, name: str) -> Launch:
    """Return the launch without its wrappers' assignments of a variable."""
    while (inner := _inner(launch)) is not None and name in inner.without:
        launch = replace(launch, argv=inner.without[name]())
    return launch


def with_plugin(
    launch: Launch, variables: Mapping[str, str], folder: Path | None, environ: Mapping[str, str]
) -> Launch:
    """Return the launch with our variables, and with those that make vLLM load the plugin.

    Args:
        launch: the command.
        variables: our variables.
        folder: a folder with the plugin, for a Python without oomguard; None if that Python has it.
        environ: the inherited environment.
    """
    env = {**launch.env, **variables}
    if folder is not None:
        env[_PATH] = os.pathsep.join([str(folder), *filter(None, [_value(launch, _PATH, environ)])])
    allowed = _value(launch, _ALLOWED, environ)
    if allowed is not None:  # join the user's allow-list, but never create one
        names = [name for name in allowed.split(",") if name]
        env[_ALLOWED] = ",".join(dict.fromkeys([*names, _PLUGIN]))
    inner = _inner(launch)
    if inner is not None and inner.set_variables is not None:
        if inner.has_no_others:
            return replace(launch, argv=inner.set_variables(env), env={})
        if beaten := {name: value for name, value in env.items() if name in inner.variables}:
            return replace(launch, argv=inner.set_variables(beaten), env=env)
    return replace(launch, env=env)


def _inner(launch: Launch) -> InnerCommand | None:
    found = inner_commands(launch.argv)
    if found:
        return found[-1]
    return None


def _sets_by_itself(launch: Launch, name: str) -> bool:
    inner = _inner(launch)
    return inner is not None and (name in inner.variables or inner.has_no_others)


def _value(launch: Launch, name: str, environ: Mapping[str, str]) -> str | None:
    """Return a variable as the innermost command sees it; None if it is unset or empty."""
    inner = _inner(launch)
    if inner is not None and name in inner.variables:
        found = inner.variables[name]
    elif inner is not None and inner.has_no_others:
        found = None
    else:
        found = launch.env.get(name, environ.get(name))
    if found or name == _ALLOWED:
        return found
    return None
