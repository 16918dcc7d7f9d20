"""When LLM inference runs out of memory: say why with numbers, change the least that fits, run again, prove it.

Everything public is here and loads on first use: ``import oomguard`` imports no engine, no numpy and nothing heavy. It imports
nothing of Python's own either: with ``python -m oomguard`` this file runs while the working directory still comes first.
"""

from oomguard._version import __version__

TYPE_CHECKING = False  # type checkers know the name; importing it would import ``typing``
if TYPE_CHECKING:
    from typing import Any

    from oomguard.budgeting.plan import plan
    from oomguard.budgeting.start import StartPlan
    from oomguard.comparing.comparison import Comparison
    from oomguard.comparing.diff import diff
    from oomguard.diagnosing import diagnose
    from oomguard.engines.ray.engine_arguments import ray_patched
    from oomguard.engines.ray.runtime_env import ray_runtime_env
    from oomguard.errors import (
        InputError,
        LaunchError,
        OomguardError,
        PlacementError,
        RuleError,
        SettingError,
        StoreError,
        UsageError,
        WakeUpError,
    )
    from oomguard.guarding.guard import Guard, guard
    from oomguard.guarding.loop import attempts
    from oomguard.incident import Attempt, Cause, Diagnosis, Effect, Incident, Patch
    from oomguard.instrumentation.watch import Watch, watch
    from oomguard.mapping.items import FailedItem
    from oomguard.mapping.map import amap, imap, map  # noqa: A004 - what it is called everywhere
    from oomguard.mapping.results import Results
    from oomguard.memory.generate.call import CallBudget
    from oomguard.memory.vllm.start import StartBudget
    from oomguard.placement.place import PlacedDevices, place
    from oomguard.remedy.policy import Policy
    from oomguard.telemetry.enabling import enable_metrics
    from oomguard.timeline import MemoryUse, SeenCall, Timeline

__all__ = [
    "Attempt",
    "CallBudget",
    "Cause",
    "Comparison",
    "Diagnosis",
    "Effect",
    "FailedItem",
    "Guard",
    "Incident",
    "InputError",
    "LaunchError",
    "MemoryUse",
    "OomguardError",
    "Patch",
    "PlacedDevices",
    "PlacementError",
    "Policy",
    "Results",
    "RuleError",
    "SeenCall",
    "SettingError",
    "StartBudget",
    "StartPlan",
    "StoreError",
    "Timeline",
    "UsageError",
    "WakeUpError",
    "Watch",
    "__version__",
    "amap",
    "attempts",
    "diagnose",
    "diff",
    "enable_metrics",
    "guard",
    "imap",
    "map",
    "place",
    "plan",
    "ray_patched",
    "ray_runtime_env",
    "watch",
]

_HOMES = {
    "budgeting.plan": ("plan",),
    "budgeting.start": ("StartPlan",),
    "comparing.comparison": ("Comparison",),
    "comparing.diff": ("diff",),
    "diagnosing": ("diagnose",),
    "engines.ray.engine_arguments": ("ray_patched",),
    "engines.ray.runtime_env": ("ray_runtime_env",),
    "errors": (
        "InputError",
        "LaunchError",
        "OomguardError",
        "PlacementError",
        "RuleError",
        "SettingError",
        "StoreError",
        "UsageError",
        "WakeUpError",
    ),
    "guarding.guard": ("Guard", "guard"),
    "guarding.loop": ("attempts",),
    "incident": ("Attempt", "Cause", "Diagnosis", "Effect", "Incident", "Patch"),
    "instrumentation.watch": ("Watch", "watch"),
    "mapping.items": ("FailedItem",),
    "mapping.map": ("amap", "imap", "map"),
    "mapping.results": ("Results",),
    "memory.generate.call": ("CallBudget",),
    "memory.vllm.start": ("StartBudget",),
    "placement.place": ("PlacedDevices", "place"),
    "remedy.policy": ("Policy",),
    "telemetry.enabling": ("enable_metrics",),
    "timeline": ("MemoryUse", "SeenCall", "Timeline"),
    "report.presentable": ("drawn", "record_repr"),  # not public: how a record shows itself
    "report.html": ("notebook_html",),  # not public: how a Diagnosis shows itself in a notebook
}


def __getattr__(name: str) -> "Any":
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"oomguard.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'oomguard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
