"""Load the estimator's measured constants by version range: sourced ones and fitted ones.

constants.toml is written by hand, fitted.toml by benchmarks/fit_constants.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import format_gib
from oomguard.core.files import read_tables

if TYPE_CHECKING:
    from packaging.version import Version


_FILES: Final = tuple(Path(__file__).with_name(name) for name in ("constants.toml", "fitted.toml"))
_LATEST: Final = "0.33"


@functools.lru_cache(maxsize=1)
def tables() -> dict[str, Any]:
    """Return both data files as one."""
    by_hand, fitted = read_tables("constants", _FILES).values()
    return {**by_hand, **fitted}


def latest() -> Version:
    """Return the newest vLLM version with constants."""
    from packaging.version import (
        Version,
    )  # version specifiers load in 13 ms, which a diagnosis does not need

    return Version(_LATEST)


def engine_version(text: str | None) -> Version:
    """Parse a vLLM version; None means the newest one with constants.

    Raises:
        SettingError: the text is not a version.
    """
    from packaging.version import InvalidVersion, Version

    if text is None:
        return latest()
    try:
        return Version(text.removeprefix("v"))
    except InvalidVersion:
        raise SettingError(
            f"engine_version must be a version, got {text!r}", hint="for example 0.30.0"
        ) from None


def rows_of(table: str, version: Version) -> list[dict[str, Any]]:
    """Return the rows of a table that apply to a version."""
    base = version.base_version
    found: list[dict[str, Any]] = []
    for row in tables()[table]:
        if _applies(row["versions"], base):
            found.append(row)
    return found


@functools.lru_cache(maxsize=4096)
def _applies(versions: str, base: str) -> bool:
    """Return whether a version is in a range; a plan asks for the same few hundreds of times."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(versions).contains(base, prereleases=True)


def constant(table: str, version: Version, **where: int) -> dict[str, Any]:
    """Return the row of a table for a version.

    If several rows differ by the number of ranks, the largest one not above the request counts.

    Raises:
        SettingError: no row applies to that version.
    """
    rows = []
    for row in rows_of(table, version):
        if all(row.get(name, 1) <= value for name, value in where.items()):
            rows.append(row)
    if not rows:
        raise SettingError(f"oomguard has no {table} constants for version {version}")
    found: dict[str, Any] = (
        max(rows, key=lambda row: [row.get(name, 1) for name in where]) if where else rows[0]
    )
    return found


def pool_range(kind: str) -> dict[str, float]:
    """Return by how much planned pools of one kind of start were off, in spreads of the pool.

    The numbers are factors downwards and upwards, and the reserve of an unmeasured version or GPU
    with its quantile.

    Args:
        kind: ``one_gpu``, ``ranks``, ``first_engine_ranks``, ``since_0_27``, ``encoder`` or
            ``other_memory``.
    """
    found: dict[str, float] = tables()["range"][kind]
    return found


def measured_groups() -> frozenset[tuple[str, str]]:
    """Return pairs of minor version and GPU whose constants come from several starts."""
    return frozenset((row["version"], row["gpu"]) for row in tables().get("measured", ()))


def since(name: str, version: Version) -> bool:
    """Return whether a version has a behavior of the defaults table."""
    from packaging.version import Version

    # a build between two releases counts as the release that it leads to, as in the tables
    return Version(version.base_version) >= Version(tables()["defaults"][name])


def reserved_ratio() -> float:
    """Return the caching allocator's overhead of a ``generate`` without a replay.

    It is a share of the tensors' bytes.
    """
    return float(tables()["generate"]["reserved_ratio"])


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that oomguard knows by name."""
    found: list[dict[str, Any]] = tables()["gpu"]
    return found


def gpu_total_bytes(name: str) -> int:
    """Return the total memory of a GPU by its name.

    Raises:
        SettingError: the name is unknown; the message lists the known ones.
    """
    wanted = plain_name(name)
    found = {plain_name(row["name"]): int(row["total_bytes"]) for row in gpus()}
    if wanted in found:
        return found[wanted]
    known = ", ".join(row["name"] for row in gpus())
    raise SettingError(
        f"unknown GPU: {name!r}", hint=f"known GPUs: {known}; or use --gpu-memory 24GiB"
    )


def plain_name(name: str) -> str:
    """Normalize a GPU's name to letters and digits without the vendor, for comparison."""
    return _letters_and_digits(name.lower().removeprefix("nvidia")).removeprefix("geforce")


def _letters_and_digits(text: str) -> str:
    return "".join(filter(str.isalnum, text))


# The free memory at an engine's start if the engine does not own all of the device: WSL2, unified
# or time-sliced memory.

KINDS: Final = ("discrete", "wsl2", "unified")


def others_margin_ratio() -> float:
    """Return the share of a device that others may allocate between two measurements."""
    return float(tables()["ceilings"]["others_margin_ratio"])


def pool_margin_bytes(total_bytes: float, *, is_on_host: bool) -> float:
    """Return the bytes to leave free next to a cache that takes the rest of a device or host."""
    margin = others_margin_ratio() * total_bytes
    if is_on_host:
        return max(margin, float(tables()["ceilings"]["host_margin_bytes"]))
    return margin


def most_free_ratio() -> float:
    """Return the highest utilization to propose if the log shows no free memory."""
    return float(tables()["ceilings"]["most_free_ratio"])


def host_reserve_bytes(total_bytes: float) -> float:
    """Return the bytes of unified memory that the host keeps, as ``oomguard run`` does."""
    known = tables()["ceilings"]
    least = min(known["host_reserve_least_bytes"], known["host_reserve_most_ratio"] * total_bytes)
    return float(max(known["host_reserve_ratio"] * total_bytes, least))


def kind_of(gpu_name: str | None, *, on_wsl2: bool = False) -> str:
    """Return a GPU's kind of memory: unified by its name, otherwise by the host."""
    plain = _letters_and_digits((gpu_name or "").lower())
    for row in tables()["ceiling"]:
        if any(name in plain for name in row["gpus"]):
            return str(row["kind"])
    if on_wsl2:
        return "wsl2"
    return "discrete"


def _free_ratio(kind: str) -> float | None:
    for row in tables()["ceiling"]:
        if row["kind"] == kind:
            return float(row["free_ratio"])
    return None


def free_at_start(total_bytes: int, kind: str, replicas: int = 1) -> tuple[int | None, str]:
    """Return the free bytes for one engine, and the reason.

    None means all except the CUDA context.

    Args:
        total_bytes: the memory of the GPU.
        kind: one of ``KINDS``.
        replicas: the number of engines on a time-sliced GPU, which does not divide its memory
            itself.

    Raises:
        SettingError: the kind is unknown.
    """
    if kind not in KINDS:
        raise SettingError(f"memory_kind {kind!r} is not known", hint=f"one of {', '.join(KINDS)}")
    ratio = _free_ratio(kind)
    if ratio is None and replicas == 1:
        return None, ""
    free = (1.0 if ratio is None else ratio) * total_bytes
    reserve = 0.0
    if kind == "unified":
        reserve = host_reserve_bytes(total_bytes)
    free = max(0, round((free - reserve) / replicas))
    if ratio is not None:
        reasons = [f"{ratio:.0%} of a device with {kind} memory is free at a start"]
    else:
        reasons = []
    if reserve:
        reasons.append(f"the host reserve takes {format_gib(reserve)} of it")
    if replicas > 1:
        reasons.append(f"{replicas} replicas share it evenly")
    return free, ", ".join(reasons)
