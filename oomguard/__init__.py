"""When LLM inference runs out of memory: say why with numbers, change the least that fits, run again, prove it.

Everything public is here and loads on first use: ``import oomguard`` imports no engine, no numpy and nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomguard._version import __version__

if TYPE_CHECKING:
    from oomguard.attempting import attempts
    from oomguard.diagnosing import diagnose
    from oomguard.errors import InputError, LaunchError, OomguardError, RuleError, SettingError, UsageError
    from oomguard.guarding import Guard, guard
    from oomguard.incident import Attempt, Cause, Diagnosis, Effect, Incident, Patch
    from oomguard.remedy.policy import Policy

__all__ = [
    "Attempt",
    "Cause",
    "Diagnosis",
    "Effect",
    "Guard",
    "Incident",
    "InputError",
    "LaunchError",
    "OomguardError",
    "Patch",
    "Policy",
    "RuleError",
    "SettingError",
    "UsageError",
    "__version__",
    "attempts",
    "diagnose",
    "guard",
]

_HOMES = {
    "attempting": ("attempts",),
    "diagnosing": ("diagnose",),
    "errors": ("InputError", "LaunchError", "OomguardError", "RuleError", "SettingError", "UsageError"),
    "guarding": ("Guard", "guard"),
    "incident": ("Attempt", "Cause", "Diagnosis", "Effect", "Incident", "Patch"),
    "remedy.policy": ("Policy",),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"oomguard.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'oomguard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
