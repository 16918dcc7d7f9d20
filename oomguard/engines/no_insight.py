"""Stand in for the module ``insight`` of an engine that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import SettingInForce
from oomguard.engines.command import Launch
from oomguard.engines.protocol import StartKey
from oomguard.engines.start_attempt import StartedEngine
from oomguard.remedy.policy import LeastValue
from oomguard.scan.source import Line


def version(_launch: Launch) -> str | None:
    """Return None."""
    return None


def start_key(_launch: Launch) -> StartKey | None:
    """Return None."""
    return None


def watched(launch: Launch, _session: Path) -> Launch:
    """Return the launch unchanged."""
    return launch


def begun(launch: Launch, _env: Mapping[str, str]) -> Launch:
    """Return the launch unchanged."""
    return launch


def started(_launch: Launch) -> tuple[StartedEngine, ...]:
    """Return no engines."""
    return ()


def said(_launch: Launch) -> tuple[Line, ...]:
    """Return no lines."""
    return ()


def survived_steps(_launch: Launch) -> Sequence[Mapping[str, Any]]:
    """Return no steps."""
    return ()


def limits(_launch: Launch) -> Mapping[str, int]:
    """Return no limits."""
    return {}


def beaten_by(_launch: Launch, _name: str, _facts: Mapping[str, Fact]) -> SettingInForce | None:
    """Return None."""
    return None


def carries(_launch: Launch, _name: str) -> bool:
    """Return True: every version of the engine has its settings."""
    return True


def asked_length(_launch: Launch) -> Mapping[str, LeastValue]:
    """Return no lengths."""
    return {}


def refused_length(_text: str, _settings: Mapping[str, FactValue]) -> Mapping[str, LeastValue]:
    """Return no lengths."""
    return {}
