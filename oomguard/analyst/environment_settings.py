"""Settings that every program with torch in it reads from a variable: carried there, beside what
the engine itself carries.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.facts import FactValue
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.probe.environment_variables import CUDA, HIP, PLAIN

ALLOCATOR: Final = "allocator_options"
# Which devices it sees. Only who places a run has a value for it.
DEVICE: Final = "device"
BY_VARIABLE: Final = frozenset({ALLOCATOR, DEVICE})
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_BY_BUS: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# torch reads the second for CUDA where both are set, and before 2.10 only that one; the third is of
# AMD's devices.
_NAMES: Final = (PLAIN, CUDA)
# vLLM's memory pools do not take expandable segments.
_AGAINST: Final = ("--enable-sleep-mode", "--kv-transfer-config")


class WithVariables:
    """An engine's launcher that carries the allocator's options too; all else is the launcher's
    own.

    Args:
        engine: how the command's engine is started.
        argv: the command, which may set the variable itself: that stays.
    """

    def __init__(self, engine: Launcher, argv: tuple[str, ...]) -> None:
        self._engine = engine
        refusing = (*(f"{name}=" for name in (*_NAMES, HIP)), *_AGAINST)
        self._is_refused = any(word.startswith(refusing) for word in argv)
        self._engine_changes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def carries(self, name: str) -> bool:
        """Return whether a launch can be changed by a setting."""
        if name == ALLOCATOR:
            return not self._is_refused and not any(
                "expandable_segments" in value for value in _set().values()
            )
        return name == DEVICE or self._engine.carries(name)

    def apply(self, launch: Launch, settings: Mapping[str, FactValue], session: Path) -> Launch:
        """Return the launch with these settings, the allocator's options and the devices in its
        variables.
        """
        others = _others(settings)
        self._engine_changes = bool(others)
        if others:
            changed = self._engine.apply(launch, others, session)
        else:
            changed = launch
        return replace(changed, env={**changed.env, **_merged(settings), **_devices(settings)})

    def shown(self, launch: Launch, settings: Mapping[str, FactValue]) -> str:
        """Return a line to paste that runs the launch with these settings."""
        line = self._engine.shown(launch, _others(settings))
        variables = {
            name: value
            for name, value in _merged(settings).items()
            if name == CUDA or name in _set()
        }
        variables |= _devices(settings)
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), line]
        )

    def took_effect(self, launch: Launch, session: Path) -> bool:
        """Return whether the settings of ``apply`` reached an engine: a variable does."""
        return not self._engine_changes or self._engine.took_effect(launch, session)


def _others(settings: Mapping[str, FactValue]) -> dict[str, FactValue]:
    return {name: value for name, value in settings.items() if name not in BY_VARIABLE}


def _devices(settings: Mapping[str, FactValue]) -> dict[str, str]:
    if DEVICE in settings:
        return {**_BY_BUS, _VISIBLE: str(settings[DEVICE])}
    return {}


def _set() -> dict[str, str]:
    """Return the allocator's variables that are set here."""
    return {name: os.environ[name] for name in (*_NAMES, HIP) if os.environ.get(name)}


def _merged(settings: Mapping[str, FactValue]) -> dict[str, str]:
    """Return the variables with the options that are set and the new ones; none where there are no
    new ones.
    """
    if ALLOCATOR not in settings:
        return {}
    own = _set()
    new = str(settings[ALLOCATOR])
    names = (*_NAMES, HIP) if HIP in own else _NAMES
    given = own.get(CUDA) or own.get(PLAIN)
    return {name: ",".join(filter(None, (own.get(name) or given, new))) for name in names}
