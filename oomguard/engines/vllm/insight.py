"""Report what is known of vLLM engines beyond their command line.

This covers the arguments that programs gave their engines, variables that override a change, and
the lengths of requests.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import SettingInForce
from oomguard.engines.command import Launch
from oomguard.engines.start_attempt import StartedEngine
from oomguard.engines.start_key import StartKey
from oomguard.engines.vllm import plugin, request_lengths
from oomguard.engines.vllm.environment import set_by_variable
from oomguard.engines.vllm.own_command import own_command
from oomguard.engines.vllm.plugin_messages import (
    logged_lines,
    reported_arguments,
    reported_engines,
    reported_limits,
    survived_steps_of,
)
from oomguard.remedy.policy import LeastValue
from oomguard.scan.source import Line

_ACKNOWLEDGED: Final = "acknowledged.jsonl"
_SAID: Final = "said.jsonl"
_ATTEMPT: Final = "attempt-"


def version(launch: Launch) -> str | None:
    """Return the version of the vLLM that the launch's Python imports; None if not found."""
    from oomguard.engines.vllm.package import installed_version

    return installed_version(launch, os.environ)


def start_key(launch: Launch) -> StartKey | None:
    """Return what determines the memory of a server's start; None if it cannot be read.

    Two commands in other words with the same key need the same memory.
    """
    from oomguard.engines.vllm.start_key import start_key as key

    return key(launch)


def watched(launch: Launch, session: Path) -> Launch:
    """Return the launch with the variables that make the plugin report the engines' arguments.

    Nothing else changes. If the program's Python has no oomguard, nothing is reported. vLLM's own
    commands show their arguments in their flags. Inside another run, the outer run gets the report.
    """
    if plugin.ACKNOWLEDGE in os.environ or plugin.LOG_FILE in os.environ:
        return launch
    if own_command(launch.argv) is not None:
        return with_log_file(launch, session)
    return with_acknowledgement(launch, session)


def begun(launch: Launch, env: Mapping[str, str]) -> Launch:
    """Return a running launch with the variables with which it was started.

    vLLM's own commands show their arguments in their flags, so they need fewer variables.
    """
    if own_command(launch.argv) is not None:
        variables = {plugin.LOG_FILE}
    else:
        variables = {plugin.LOG_FILE, plugin.REPORT, plugin.ACKNOWLEDGE}
    return replace(
        launch,
        env={**launch.env, **{name: value for name, value in env.items() if name in variables}},
    )


def with_acknowledgement(launch: Launch, session: Path) -> Launch:
    """Return the launch of a new attempt in which the plugin reports the engines' arguments."""
    launch = with_log_file(launch, session)
    acknowledged = str(Path(launch.env[plugin.LOG_FILE]).with_name(_ACKNOWLEDGED))
    return replace(
        launch,
        env={
            **launch.env,
            plugin.REPORT: json.dumps(reported_arguments()),
            plugin.ACKNOWLEDGE: acknowledged,
        },
    )


def with_log_file(launch: Launch, session: Path) -> Launch:
    """Return the launch of a new attempt in which the plugin copies vLLM's log to a file.

    So the log can be read wherever the engines' output goes. The engines recover from an
    out-of-memory in a step, unless the user turned that off.
    """
    recovers = os.environ.get(plugin.STEP_RECOVERY, "1")
    noted = {
        plugin.LOG_FILE: str(_begin_attempt(session) / _SAID),
        plugin.STEP_RECOVERY: recovers,
    }
    return replace(launch, env={**launch.env, **noted})


def said(launch: Launch) -> tuple[Line, ...]:
    """Return the log lines of the launch's engines that the plugin copied."""
    noted = launch.env.get(plugin.LOG_FILE)
    if noted is None:
        return ()
    return logged_lines(Path(noted))


def survived_steps(launch: Launch) -> list[dict[str, Any]]:
    """Return the steps so far that ran out of memory and did not end the launch's engines."""
    noted = launch.env.get(plugin.LOG_FILE)
    if noted is None:
        return []
    return survived_steps_of(Path(noted))


def limits(launch: Launch) -> dict[str, int]:
    """Return the memory limits of the launch's processes by fact, if the plugin reported any."""
    noted = launch.env.get(plugin.LOG_FILE)
    if noted is None:
        return {}
    return reported_limits(Path(noted))


def started(launch: Launch) -> tuple[StartedEngine, ...]:
    """Return the engines that the launch's program started, as the plugin reported them."""
    acknowledged = launch.env.get(plugin.ACKNOWLEDGE)
    if acknowledged is None:
        return ()
    return reported_engines(Path(acknowledged))


def beaten_by(launch: Launch, name: str, facts: Mapping[str, Fact]) -> SettingInForce | None:
    """Return the environment variable that overrides a setting's flag; None without one."""
    return set_by_variable(launch, name, facts, os.environ)


def carries(launch: Launch, name: str) -> bool:
    """Return whether oomguard can change a setting in the launch's engine.

    It can if the engine's version has the setting, or the engine's own sources show it.
    """
    from oomguard.engines.vllm.package import may_carry

    return may_carry(launch, name)


def asked_length(launch: Launch) -> Mapping[str, LeastValue]:
    """Return the shortest length that the command's own requests need, by the setting for it."""
    return request_lengths.asked_length(launch)


def refused_length(text: str, settings: Mapping[str, FactValue]) -> Mapping[str, LeastValue]:
    """Return the length that the engine refused under these settings; empty without a refusal."""
    return request_lengths.refused_length(text, settings)


def _begin_attempt(session: Path) -> Path:
    """Make the folder of a new attempt and remove those before it.

    Processes that an earlier attempt left running are not changed any more.
    """
    for ended in session.glob(f"{_ATTEMPT}*"):
        shutil.rmtree(ended, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_ATTEMPT, dir=session))
