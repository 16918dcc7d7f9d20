"""Find what of oomguard is installed, and name the command that installs more of it.

``cluster``, ``mapping`` and ``telemetry`` are optional packages; only this module names them. If
the folder of one is missing, its commands and options are missing too, and everything else works.
``mapping`` adds only public functions, which ``oomguard/__init__.py`` loads on first use.

oomguard is not on a package index. Anyone who registers its name there could run code on the user's
machine, so no command asks an index for ``oomguard``. The command names the clone, the wheel file
or the repository that pip recorded (PEP 610). Without such a record it names the extra's own
packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

# The build reads the version of the package from this line.
__version__ = "0.2.0"
_DISTRIBUTION = "oomguard"


def install_hint(extra: str) -> str:
    """Return the command that installs one of oomguard's extras.

    Args:
        extra: its name in ``pyproject.toml``, such as ``postgres``.

        >>> install_hint("plots")
        "pip install '/home/ada/oomguard[plots]'"
    """
    source = _recorded_source()
    if source is None:
        return _install_packages(extra)
    return f"pip install {source.argument(extra)}"


def upgrade_hint() -> str:
    """Return the command or sentence that says how to install a newer oomguard."""
    source = _recorded_source()
    if source is None:
        return "install a newer oomguard from the wheel file or clone that this one came from"
    if not source.is_path:
        return f"pip install --force-reinstall --no-deps {source.argument()}"
    if Path(source.place).is_dir():
        return f"git -C '{source.place}' pull && pip install {source.argument()}"
    return "install the wheel file of a newer oomguard"


def reinstall_hint() -> str:
    """Return the command that reinstalls this oomguard without its dependencies."""
    source = _recorded_source()
    if source is None:
        return "install oomguard again from the wheel file or clone that it came from"
    return f"pip install --force-reinstall --no-deps {source.argument()}"


class _Source(NamedTuple):
    """Hold the path or URL from which pip installed oomguard."""

    place: str
    is_path: bool
    is_editable: bool = False

    def argument(self, extra: str = "") -> str:
        """Return the argument for ``pip install``, with an extra if one is named."""
        if extra:
            extras = f"[{extra}]"
        else:
            extras = ""
        if not self.is_path:
            return f"'{_DISTRIBUTION}{extras} @ {self.place}'"
        if self.is_editable:
            option = "-e "
        else:
            option = ""
        return f"{option}'{self.place}{extras}'"


def _recorded_source() -> _Source | None:
    """Return the source that pip recorded; None without a record or if the path is gone."""
    record = _direct_url()
    url = str(record.get("url", ""))
    parts = urlsplit(url)
    if "vcs_info" in record:
        return _Source(f"{record['vcs_info'].get('vcs', 'git')}+{url}", is_path=False)
    if parts.scheme != "file":
        if url:
            return _Source(url, is_path=False)
        return None
    path = unquote(parts.path)
    if not Path(path).exists():
        return None
    is_editable = bool(record.get("dir_info", {}).get("editable"))
    return _Source(path, is_path=True, is_editable=is_editable)


def _direct_url() -> dict[str, Any]:
    # This import takes 60 ms, and only a hint needs it.
    from importlib import metadata

    try:
        text = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
        record = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    if isinstance(record, dict):
        return record
    return {}


def _install_packages(extra: str) -> str:
    packages = [f"'{requirement}'" for requirement in _requirements_of(extra)]
    if not packages:
        return f"install oomguard again from your clone or wheel file, with its extra: '.[{extra}]'"
    return f"pip install {' '.join(packages)}"


def _requirements_of(extra: str) -> list[str]:
    """Return the packages that an extra adds, in pip's syntax."""
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    found: list[str] = []
    try:
        rows = metadata.requires(_DISTRIBUTION) or []
        for requirement in map(Requirement, rows):
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": ""}):
                continue
            if marker.evaluate({"extra": extra}):
                requirement.marker = None
                found.append(str(requirement))
    except (metadata.PackageNotFoundError, InvalidRequirement):
        return []
    return found


_MODULES: Final = {
    "call_metrics": "oomguard.telemetry.guarded_calls",
    "run_metrics": "oomguard.telemetry.run_metrics",
    "run_cluster": "oomguard.cluster.options",
    "fleet_summary": "oomguard.cluster.fleet",
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
    found = {}
    for name, command in _COMMANDS.items():
        if _is_installed(command.module):
            found[name] = command
    return found


def _is_installed(module: str) -> bool:
    """Return whether the package of a module is installed, without importing it."""
    package = ".".join(module.split(".")[:2])
    spec = importlib.util.find_spec(package)
    # An empty folder, which an uninstall can leave, has a specification without a file.
    return spec is not None and spec.origin is not None
