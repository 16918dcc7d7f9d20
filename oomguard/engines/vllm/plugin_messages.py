"""Read what the plugin reported of the engines that a program started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.files import read_regular
from oomguard.core.setting_spellings import surfaces
from oomguard.engines.command import StartedEngine
from oomguard.engines.vllm.in_process.message_receiver import lines_of
from oomguard.scan.source import Line

_ENGINE: Final = "vllm"
_MOST_BYTES: Final = 5 << 20
_LIMITS: Final = ("process_data_limit_bytes", "host_available_bytes")


def reported_arguments() -> list[str]:
    """Return the argument names that the plugin is to report: those of known settings only."""
    rows = [own for newest in surfaces(_ENGINE).values() for own in (newest, *newest.others)]
    return list(dict.fromkeys(own.kwarg for own in rows if own.kwarg is not None))


def reported_engines(path: Path) -> tuple[StartedEngine, ...]:
    """Return the engines in the plugin's file, in the order of their starts.

    Lines that are not valid reports are skipped.
    """
    try:
        lines = read_regular(path, _MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            known = found.setdefault((int(row["pid"]), int(row.get("order", 1))), {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        known |= {
            key: value for key, value in row.items() if key == "model" or isinstance(value, dict)
        }
    return tuple(
        StartedEngine(
            row["model"] if isinstance(row.get("model"), str) else None,
            order,
            process,
            settings_of(row["arguments"]) if "arguments" in row else None,
            settings_of(row.get("config", {})),
            settings_of(row.get("applied", {})),
        )
        for (process, order), row in found.items()
    )


def logged_lines(path: Path) -> tuple[Line, ...]:
    """Return vLLM's log records in the plugin's file, as lines of a log."""
    return lines_of(_noted(path))


def reported_limits(path: Path) -> dict[str, int]:
    """Return the lowest memory limits that processes of vLLM reported, by fact."""
    found: dict[str, int] = {}
    for row in _noted(path):
        limits = row.get("limits")
        for name in _LIMITS:
            if isinstance(limits, dict):
                limit = limits.get(name)
            else:
                limit = None
            if isinstance(limit, int) and limit > 0:
                found[name] = min(limit, found.get(name, limit))
    return found


def survived_steps_of(path: Path) -> list[dict[str, Any]]:
    """Return the steps that ran out of memory and did not end their engine, in order."""
    rows = (row.get("step_recovery") for row in _noted(path))
    return [row for row in rows if isinstance(row, dict)]


def _noted(path: Path) -> list[dict[str, Any]]:
    try:
        texts = read_regular(path, _MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    rows = []
    for text in texts:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def settings_of(arguments: Mapping[str, Any]) -> dict[str, FactValue]:
    """Return the engine's arguments as canonical settings in oomguard's units.

    Arguments without a setting are left out.
    """
    names = {
        own.kwarg: name
        for name, row in surfaces(_ENGINE).items()
        for own in (*row.others, row)
        if own.kwarg
    }
    found: dict[str, FactValue] = {}
    for kwarg, value in arguments.items():
        name = names.get(kwarg)
        if name is None or not isinstance(value, (bool, int, float, str)):
            continue
        own = surfaces(_ENGINE)[name]
        if str(value) in own.automatic:
            continue
        try:
            if isinstance(value, bool) or own.unit_bytes == 1:
                found[name] = value
            else:
                found[name] = own.from_engine(name, str(value))
        except SettingError:
            continue
    return found
