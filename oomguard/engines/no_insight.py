"""What is known of an engine that has no module ``insight``: nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import SettingInForce
from oomguard.engines.command import Launch
from oomguard.engines.start_attempt import StartedEngine
from oomguard.engines.start_key import StartKey
from oomguard.remedy.policy import LeastValue
from oomguard.scan.source import Line


def version(_launch: Launch) -> str | None:
    """Return None."""
    return None


def start_key(_launch: Launch) -> StartKey | None:
    """Return None."""
    return None


def watched(launch: Launch, _session: Path) -> Launch:
    """Return the launch as it is."""
    return launch


def begun(launch: Launch, _env: Mapping[str, str]) -> Launch:
    """Return the launch as it is."""
    return launch


def started(_launch: Launch) -> tuple[StartedEngine, ...]:
    """Return none."""
    return ()


def said(_launch: Launch) -> tuple[Line, ...]:
    """Return none."""
    return ()


def limits(_launch: Launch) -> Mapping[str, int]:
    """Return none."""
    return {}


def beaten_by(_launch: Launch, _name: str, _facts: Mapping[str, Fact]) -> SettingInForce | None:
    """Return None."""
    return None


def carries(_launch: Launch, _name: str) -> bool:
    """Return True: what the engine carries it carries into every version."""
    return True


def asked_length(_launch: Launch) -> Mapping[str, LeastValue]:
    """Return none."""
    return {}


def refused_length(_text: str, _settings: Mapping[str, FactValue]) -> Mapping[str, LeastValue]:
    """Return none."""
    return {}
