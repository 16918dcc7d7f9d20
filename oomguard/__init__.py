"""Explain why LLM inference ran out of memory, change as little as possible, and run it again.

Explain a log, an exception or a text, and print what to do first:

    import oomguard

    print(oomguard.diagnose(path="error.log"))

Keep a job alive: if a call runs out of memory, oomguard runs its rows in smaller parts.

    @oomguard.guard
    def answer(prompts):
        return model.generate(**tokenizer(prompts, return_tensors="pt", padding=True).to("cuda"))

Estimate the memory before a start:

    print(oomguard.plan("Qwen/Qwen3-8B", gpu_memory="24GiB", max_model_len=8192))

Everything public loads on first use: ``import oomguard`` imports no engine, no numpy and nothing
heavy. With ``python -m oomguard`` this file runs while the working directory still comes first, so
it imports nothing of Python's own either.
"""

TYPE_CHECKING = False  # type checkers know the name; importing it would import ``typing``
if TYPE_CHECKING:
    from typing import Any

    from oomguard.cluster.placement.devices import PlacedDevices, place
    from oomguard.comparison import Comparison, diff
    from oomguard.core.errors import (
        ConfigError,
        DeadlineError,
        InputError,
        JournalError,
        LaunchError,
        OomguardError,
        PlacementError,
        RuleError,
        SettingError,
        StoreError,
        UsageError,
        WakeUpError,
    )
    from oomguard.core.incident import Attempt, Cause, Diagnosis, Effect, Incident, Patch
    from oomguard.core.installation import __version__
    from oomguard.core.measurements import MemoryUse, SeenCall, Timeline
    from oomguard.diagnosis import diagnose
    from oomguard.engines.ray.engine_arguments import ray_patched, ray_runtime_env
    from oomguard.estimate.call.call_budget import CallBudget
    from oomguard.estimate.start.start import StartBudget
    from oomguard.guarding.attempts import attempts
    from oomguard.guarding.guard import Guard, guard
    from oomguard.instrumentation import Watch, watch
    from oomguard.mapping.items import FailedItem
    from oomguard.mapping.map import Results, amap, imap, map  # noqa: A004 - what it is called everywhere
    from oomguard.planning.plan import plan
    from oomguard.planning.start import StartPlan
    from oomguard.remedy.policy import Policy
    from oomguard.telemetry.guarded_calls import enable_metrics

__all__ = [
    "Attempt",
    "CallBudget",
    "Cause",
    "Comparison",
    "ConfigError",
    "DeadlineError",
    "Diagnosis",
    "Effect",
    "FailedItem",
    "Guard",
    "Incident",
    "InputError",
    "JournalError",
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
    "planning.plan": ("plan",),
    "planning.start": ("StartPlan",),
    "comparison": ("Comparison", "diff"),
    "diagnosis": ("diagnose",),
    "engines.ray.engine_arguments": ("ray_patched", "ray_runtime_env"),
    "core.errors": (
        "ConfigError",
        "DeadlineError",
        "InputError",
        "JournalError",
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
    "guarding.attempts": ("attempts",),
    "core.incident": ("Attempt", "Cause", "Diagnosis", "Effect", "Incident", "Patch"),
    "core.installation": ("__version__",),
    "instrumentation": ("Watch", "watch"),
    "mapping.items": ("FailedItem",),
    "mapping.map": ("Results", "amap", "imap", "map"),
    "estimate.call.call_budget": ("CallBudget",),
    "estimate.start.start": ("StartBudget",),
    "cluster.placement.devices": ("PlacedDevices", "place"),
    "remedy.policy": ("Policy",),
    "telemetry.guarded_calls": ("enable_metrics",),
    "core.measurements": ("MemoryUse", "SeenCall", "Timeline"),
    "core.presentable": ("drawn", "record_repr"),  # not public: how a record shows itself
    "report.record_forms": ("record_dict", "record_markdown", "record_text"),  # not public
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
