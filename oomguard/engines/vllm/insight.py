"""What is known of vLLM engines beyond their command: what their programs gave them, what beats a
change, how long requests are.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import SettingInForce
from oomguard.engines.command import Launch
from oomguard.engines.start_attempt import StartedEngine
from oomguard.engines.start_key import StartKey
from oomguard.engines.vllm import plugin, request_lengths
from oomguard.engines.vllm.environment import set_by_variable
from oomguard.engines.vllm.own_command import own_command
from oomguard.engines.vllm.plugin_messages import (
    arguments_told,
    noted_limits,
    noted_lines,
    told_engines,
)
from oomguard.remedy.policy import LeastValue
from oomguard.scan.source import Line

_ACKNOWLEDGED: Final = "acknowledged.jsonl"
_SAID: Final = "said.jsonl"
_ATTEMPT: Final = "attempt-"


def version(launch: Launch) -> str | None:
    """Return the version of the vLLM that lies where the launch's Python finds it."""
    from oomguard.engines.vllm.package import installed_version

    return installed_version(launch, os.environ)


def start_key(launch: Launch) -> StartKey | None:
    """Return what decides the memory of a server's start, so that other words for it are known;
    None where that cannot be read.
    """
    from oomguard.engines.vllm.start_key import start_key as key

    return key(launch)


def watched(launch: Launch, session: Path) -> Launch:
    """Return the launch with what makes a plugin that is installed tell the arguments of the
    engines that a program starts.

    Nothing else is changed: where the program's Python has no oomguard nobody tells. The engine's
    own commands tell their arguments by themselves, and inside another run the outer one is told.
    """
    if plugin.ACKNOWLEDGE in os.environ or plugin.SAID in os.environ:
        return launch
    if own_command(launch.argv) is not None:
        return noting(launch, session)
    return telling(launch, session)


def begun(launch: Launch, env: Mapping[str, str]) -> Launch:
    """Return the launch that runs already with these variables: the engine's own commands tell
    their arguments by themselves.
    """
    if own_command(launch.argv) is not None:
        told = {plugin.SAID}
    else:
        told = {plugin.SAID, plugin.REPORT, plugin.ACKNOWLEDGE}
    return replace(
        launch, env={**launch.env, **{name: value for name, value in env.items() if name in told}}
    )


def telling(launch: Launch, session: Path) -> Launch:
    """Return the launch of a new attempt, whose engines the plugin tells."""
    launch = noting(launch, session)
    told = str(Path(launch.env[plugin.SAID]).with_name(_ACKNOWLEDGED))
    return replace(
        launch,
        env={**launch.env, plugin.REPORT: json.dumps(arguments_told()), plugin.ACKNOWLEDGE: told},
    )


def noting(launch: Launch, session: Path) -> Launch:
    """Return the launch of a new attempt, of whose engines the plugin notes what vLLM logs,
    wherever their output goes.
    """
    return replace(launch, env={**launch.env, plugin.SAID: str(_begin_attempt(session) / _SAID)})


def said(launch: Launch) -> tuple[Line, ...]:
    """Return what the engines of the launch logged, as lines, as far as the plugin noted it."""
    noted = launch.env.get(plugin.SAID)
    if noted is None:
        return ()
    return noted_lines(Path(noted))


def limits(launch: Launch) -> dict[str, int]:
    """Return what a process of the launch's engines may have of memory by fact, as far as the
    plugin noted one that is limited.
    """
    noted = launch.env.get(plugin.SAID)
    if noted is None:
        return {}
    return noted_limits(Path(noted))


def started(launch: Launch) -> tuple[StartedEngine, ...]:
    """Return the engines that the launch's program started, as far as the plugin told them."""
    told = launch.env.get(plugin.ACKNOWLEDGE)
    if told is None:
        return ()
    return told_engines(Path(told))


def beaten_by(launch: Launch, name: str, facts: Mapping[str, Fact]) -> SettingInForce | None:
    """Return the variable of the environment that sets a setting over flag and argument, as a
    setting in force; None without one.
    """
    return set_by_variable(launch, name, facts, os.environ)


def carries(launch: Launch, name: str) -> bool:
    """Return whether a setting may be carried into the engine of the launch: its version has it, or
    its own sources show it.
    """
    from oomguard.engines.vllm.package import may_carry

    return may_carry(launch, name)


def asked_length(launch: Launch) -> Mapping[str, LeastValue]:
    """Return the least length of a request that the command itself asks for, by the setting that
    limits it.
    """
    return request_lengths.asked_length(launch)


def refused_length(text: str, settings: Mapping[str, FactValue]) -> Mapping[str, LeastValue]:
    """Return the length that the engine refused under one of these settings, by setting; empty
    where it refused none.
    """
    return request_lengths.refused_length(text, settings)


def _begin_attempt(session: Path) -> Path:
    """Make the folder of the attempt that begins, and end those before it: what they left running
    is changed no more.
    """
    for ended in session.glob(f"{_ATTEMPT}*"):
        shutil.rmtree(ended, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_ATTEMPT, dir=session))
