"""Report what is known of vLLM engines beyond their command line.

This covers the arguments that programs gave their engines, variables that override a change, and
the lengths of requests.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import SettingInForce
from oomguard.engines.command import AllFlags, Launch, StartedEngine, all_flags
from oomguard.engines.protocol import StartKey
from oomguard.engines.unwrap_command import InnerCommand, inner_commands
from oomguard.engines.vllm import plugin
from oomguard.engines.vllm.command import NAME, ByFlags, own_command, set_by_variable, table
from oomguard.engines.vllm.in_process.message_receiver import (
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
    noted = {name: env[name] for name in env.keys() & variables}
    return replace(launch, env={**launch.env, **noted})


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
    # vLLM's own commands have no such file: their flags say the same.
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


def _begin_attempt(session: Path) -> Path:
    """Make the folder of a new attempt and remove those before it.

    Processes that an earlier attempt left running are not changed any more.
    """
    for ended in session.glob(f"{_ATTEMPT}*"):
        shutil.rmtree(ended, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_ATTEMPT, dir=session))


# Reduce a ``vllm serve`` command to what determines the memory of its start.
#
# Two commands with the same key are the same start, however they are written.


_SERVE: Final = ("vllm", "serve")


def start_key(launch: Launch) -> StartKey | None:
    """Return the key of a ``vllm serve``: model, settings, other flags with memory, variables.

    None for any other command, for a word that cannot be read, and for a flag that no known version
    has. Address, served name, API keys and logging flags do not change the key.
    """
    own = own_command(launch.argv)
    if not isinstance(own, ByFlags) or (own.command.program, *own.command.args[:1]) != _SERVE:
        return None
    command = own.command
    if command.has_unread or command.is_elsewhere or command.has_no_others:
        return None
    others = list(_others(command.args[1:], all_flags(NAME)))
    if None in others:
        return None
    settings = {name: setting.value for name, setting in own.settings().items()}
    if settings.get("model") is None:
        return None
    return StartKey(
        settings,
        frozenset(filter(None, others)) | {f"{k}={v}" for k, v in command.variables.items()},
    )


def _others(words: tuple[str, ...], flags: AllFlags) -> Iterator[str | None]:
    """Yield each flag that takes memory and is not a setting, with its value.

    Yield None for an unknown flag, and end.
    """
    at = 0
    while at < len(words):
        if not words[at].startswith("-"):
            at += 1
            continue
        name = flags.name_of(words[at])
        if name is None or name == "config":
            yield None
            return
        end = flags.end_of(words, at, name)
        if name.removeprefix("no-") in flags.takes_memory:
            yield " ".join((name, words[at].partition("=")[2], *words[at + 1 : end]))
        at = end


# Find the request lengths that a command needs, from its flags and from refusals.


_MOST_DIGITS: Final = 9


def asked_length(launch: Launch) -> Mapping[str, LeastValue]:
    """Return the shortest length that the command's own requests need, by the setting for it.

    The mapping is empty if the command states no length.
    """
    longest = LeastValue(0, "")
    for command in inner_commands(launch.argv):
        for need in _needs(command):
            longest = max(longest, need, key=lambda need: need.value)
    if longest.value:
        return {table()["refusals"]["setting"]: longest}
    return {}


def refused_length(text: str, settings: Mapping[str, FactValue]) -> Mapping[str, LeastValue]:
    """Return the length that the engine refused under these settings; empty without a refusal.

    A refusal under another limit than ours does not count. If the refusal prints no length, any
    lower limit would be refused, so the least length is ``inf``.
    """
    name = table()["refusals"]["setting"]
    for pattern in _patterns() if name in settings else ():
        for found in pattern.finditer(text):
            named = found.groupdict()
            if named.get("most", str(settings[name])) != str(settings[name]):
                continue
            asked = named.get("asked")
            needed = named.get("needed")
            tokens = math.inf
            if asked:
                tokens = int(asked)
            elif needed:
                tokens = int(needed) + 1
            return {name: LeastValue(tokens, "a request of this run needs")}
    return {}


@functools.cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in table()["refusals"]["patterns"])


def _needs(command: InnerCommand) -> list[LeastValue]:
    words = (command.program, *command.args)
    given = _numbers(command.args)
    rows = table()["lengths"]
    of_command = []
    of_any_command = []
    for row in rows:
        if "of" not in row:
            if not given.keys().isdisjoint(row["parts"][0]["flags"]):
                of_any_command.append(row)
            continue
        is_command = any(words[: len(of)] == tuple(of) for of in row["of"])
        if is_command and given.keys().isdisjoint(row.get("unless", ())):
            of_command.append(row)
    return [_need(row, given) for row in of_command or of_any_command]


def _need(row: Mapping[str, Any], given: Mapping[str, str]) -> LeastValue:
    tokens = 0
    shown: list[str] = []
    for part in row["parts"]:
        for flag in part["flags"]:
            number = _count(given.get(flag))
            if number is not None:
                tokens += number
                shown.append(f"{flag} {given[flag]}")
                break
        else:
            tokens += part.get("other", 0)
    share = given.get(row.get("stretch", ""), "")
    if re.fullmatch(r"0?\.\d{1,6}|1(?:\.0)?", share):
        tokens = math.ceil(tokens * (1 + float(share)))
    return LeastValue(tokens, f"the command asks for ({' '.join(shown) or 'by default'})")


def _count(text: str | None) -> int | None:
    if text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text)
    return None


def _numbers(args: Sequence[str]) -> dict[str, str]:
    """Return the value of each long flag; the last one if a flag is repeated."""
    found: dict[str, str] = {}
    for i, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            if equals:
                found[flag.replace("_", "-")] = value
            elif i + 1 < len(args):
                found[flag.replace("_", "-")] = args[i + 1]
            else:
                found[flag.replace("_", "-")] = ""
    return found
