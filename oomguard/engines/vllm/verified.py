"""Which settings may be carried into a vLLM: those its version has; of a version not known here, those its own sources show.

What is not shown is left as it is: an unknown engine is diagnosed, and changed only through what was seen to be there.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final

from oomguard.engines.command import Launch
from oomguard.engines.vllm.installed import installed_package
from oomguard.engines.vllm.own_command import ByFlags, own_command
from oomguard.engines.vllm.sources import Sources, read_sources
from oomguard.log import get_logger
from oomguard.surfaces import surface
from oomguard.user_files import read_tables

_ENGINE: Final = "vllm"
_FILE: Final = Path(__file__).with_name("verified.toml")


def may_carry(launch: Launch, name: str) -> bool:
    """Return whether a setting may be carried into the engine of a launch; say once why it may not."""
    reason = _why_not(launch, name)
    if reason is not None:
        _say(reason)
    return reason is None


@functools.cache
def verified_versions() -> tuple[str, ...]:
    """Return the releases whose sources were read, the oldest first."""
    return tuple(next(iter(read_tables("vllm_verified", [_FILE]).values()))["versions"])


def is_known(version: str) -> bool:
    """Return whether a release of the version's minor version was read, and none that is newer than it is the oldest one."""
    from packaging.version import InvalidVersion, Version

    known = [Version(text) for text in verified_versions()]
    try:
        asked = Version(Version(version).base_version)
    except InvalidVersion:
        return False
    return asked >= known[0] and asked.release[:2] in {one.release[:2] for one in known}


def _why_not(launch: Launch, name: str) -> str | None:
    """Return why a setting may not be carried; None where it may. Of an engine that printed no version the newest is assumed."""
    own, carrier = surface(name, _ENGINE, launch.engine_version), own_command(launch.argv)
    by_flag = isinstance(carrier, ByFlags)
    if launch.engine_version is None or is_known(launch.engine_version):
        has = own.flags if by_flag else own.kwarg
        return None if has else f"vLLM {launch.engine_version} has no {name}"
    unknown = f"vLLM {launch.engine_version} is not a version that is known here"
    package = installed_package(launch, os.environ)
    found = None if package is None else _read(package)
    if found is None:
        return f"{unknown}, and its sources are not found on this machine"
    if by_flag:
        return None if own.flags and own.flags[0] in found.flags else f"{unknown}, and it shows no flag for {name}"
    if carrier is None and found.hook_problem is not None:
        return f"{unknown}, and {found.hook_problem}"
    return None if own.kwarg in found.arguments else f"{unknown}, and it shows no argument {name}"


@functools.cache
def _read(package: Path) -> Sources | None:
    try:
        return read_sources(package)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@functools.cache
def _say(reason: str) -> None:
    get_logger().warning("left as it is", reason=reason)
