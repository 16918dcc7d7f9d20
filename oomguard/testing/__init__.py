"""Test on the CPU whether a job fits a GPU that you do not have, and what happens if it does not.

Names load on first use: pytest loads the plugin in this package, and must not load torch if no test
needs a device.
"""

from typing import TYPE_CHECKING, Any

from oomguard.testing.limit import active_device

if TYPE_CHECKING:
    from oomguard.testing.limit import limit_memory
    from oomguard.testing.simulated_device import SimulatedDevice
    from oomguard.testing.wordings import oom_error

__all__ = ["SimulatedDevice", "active_device", "limit_memory", "oom_error"]

_HOMES = {"SimulatedDevice": "simulated_device", "limit_memory": "limit", "oom_error": "wordings"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'oomguard.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"oomguard.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
