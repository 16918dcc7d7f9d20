"""Load the modules of optional packages; no other module names them.

``cluster``, ``mapping`` and ``telemetry`` are optional. If the folder of one is missing, its
commands and options are missing too, and everything else works. ``mapping`` adds only public
functions, which ``oomguard/__init__.py`` loads when a program uses them.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Final, NamedTuple

_MODULES: Final = {
    "call_metrics": "oomguard.telemetry.guarded_calls",
    "run_metrics": "oomguard.telemetry.run_metrics",
    "run_cluster": "oomguard.cluster.options",
    "fleet_summary": "oomguard.cluster.fleet.summary_report",
}


class OptionalCommand(NamedTuple):
    """Describe a sub-command of an optional package: its module and its help line."""

    module: str
    help: str


_COMMANDS: Final = {
    "gpus": OptionalCommand(
        "oomguard.cluster.placement.gpus",
        "Show each GPU with its processes, leases and hidden devices.",
    ),
}


def has_extension(name: str) -> bool:
    """Return whether the package that adds ``name`` is installed, without importing it.

    Raises:
        KeyError: no optional package adds anything of this name.
    """
    return _is_installed(_MODULES[name])


def extension(name: str) -> ModuleType | None:
    """Import the module that adds ``name``.

    ```python
    metrics = extension("run_metrics")
    if metrics is not None:
        function = metrics.metrics_option(function)
    ```

    Args:
        name: what the module adds, such as ``run_metrics``.

    Returns:
        The module, or None if its package is not installed.

    Raises:
        KeyError: no optional package adds anything of this name.
    """
    module = _MODULES[name]
    if not _is_installed(module):
        return None
    return importlib.import_module(module)


def optional_commands() -> dict[str, OptionalCommand]:
    """Return the sub-commands of the optional packages that are installed, by name."""
    return {name: command for name, command in _COMMANDS.items() if _is_installed(command.module)}


def _is_installed(module: str) -> bool:
    """Return whether the package of a module is installed, without importing it."""
    package = ".".join(module.split(".")[:2])
    spec = importlib.util.find_spec(package)
    # An empty folder, which an uninstall can leave, has a specification without a file.
    return spec is not None and spec.origin is not None
