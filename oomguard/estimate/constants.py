"""The measured constants of the memory model, a row for each range of versions: those with a
source, and those that a fit found.

constants.toml is written by hand, fitted.toml by benchmarks/fit_constants.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import SettingError
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
    """Return the newest vLLM that is known here."""
    from packaging.version import (
        Version,
    )  # with its specifiers 13 ms, which a diagnosis does without

    return Version(_LATEST)


def engine_version(text: str | None) -> Version:
    """Read a vLLM version, the newest known one for None; raises SettingError for what is no
    version.
    """
    from packaging.version import InvalidVersion, Version

    if text is None:
        return latest()
    try:
        return Version(text.removeprefix("v"))
    except InvalidVersion:
        raise SettingError(
            f"engine_version is {text!r}, not a version", hint="for example 0.30.0"
        ) from None


def rows_of(table: str, version: Version) -> list[dict[str, Any]]:
    """Return the rows of a table that hold for a version, in their order."""
    from packaging.specifiers import SpecifierSet

    base = version.base_version
    return [
        row
        for row in tables()[table]
        if SpecifierSet(row["versions"]).contains(base, prereleases=True)
    ]


def constant(table: str, version: Version, **where: int) -> dict[str, Any]:
    """Return the row of a table for a version; of rows for several numbers of ranks the largest not
    above those asked for.

    Raises:
        SettingError: no row is for that version.
    """
    rows = [
        row
        for row in rows_of(table, version)
        if all(row.get(name, 1) <= value for name, value in where.items())
    ]
    if not rows:
        raise SettingError(f"nothing is known of {table} in version {version}")
    found: dict[str, Any] = (
        max(rows, key=lambda row: [row.get(name, 1) for name in where]) if where else rows[0]
    )
    return found


def pool_range(kind: str) -> dict[str, float]:
    """Return how a planned pool's range is widened for a kind of start: by a share of the device,
    then by a factor.
    """
    found: dict[str, float] = tables()["range"][kind]
    return found


def kept_back() -> dict[str, float]:
    """Return what a plan keeps back of starts whose version and GPU were not measured: a share of
    the device, and its quantile.
    """
    found: dict[str, float] = tables()["kept_back"]["elsewhere"]
    return found


def measured_groups() -> frozenset[tuple[str, str]]:
    """Return the minor versions, each with the name of a GPU, of which the constants come from
    several starts.
    """
    return frozenset((row["version"], row["gpu"]) for row in tables().get("measured", ()))


def since(name: str, version: Version) -> bool:
    """Whether a behaviour of the defaults table was there in a version."""
    from packaging.version import Version

    return version >= Version(tables()["defaults"][name])


def reserved_ratio() -> float:
    """Return what the caching allocator holds beyond the tensors of a ``generate`` that is not
    replayed, as a share of them.
    """
    return float(tables()["generate"]["reserved_ratio"])


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that are known by name."""
    found: list[dict[str, Any]] = tables()["gpu"]
    return found


def gpu_total_bytes(name: str) -> int:
    """Return the total memory of a GPU by its name; raises SettingError with the known names."""
    wanted = plain_name(name)
    found = {plain_name(row["name"]): int(row["total_bytes"]) for row in gpus()}
    if wanted in found:
        return found[wanted]
    known = ", ".join(row["name"] for row in gpus())
    raise SettingError(f"unknown GPU: {name!r}", hint=f"known are {known}; or --gpu-memory 24GiB")


def plain_name(name: str) -> str:
    """Return a GPU's name as its rows are compared by: letters and digits, without the maker's."""
    return "".join(c for c in name.lower().removeprefix("nvidia") if c.isalnum()).removeprefix(
        "geforce"
    )


# How much of a device is free when an engine starts, where its memory is not the engine's alone:
# WSL2, unified, time-sliced.

KINDS: Final = ("discrete", "wsl2", "unified")


def others_margin_ratio() -> float:
    """Return the share of a device that other processes may still take between two looks at what is
    free.
    """
    return float(tables()["ceilings"]["others_margin_ratio"])


def pool_margin_bytes(total_bytes: float, *, is_on_host: bool) -> float:
    """Return what has to stay free beside a cache that takes all else of a device, or of a host."""
    margin = others_margin_ratio() * total_bytes
    if is_on_host:
        return max(margin, float(tables()["ceilings"]["host_margin_bytes"]))
    return margin


def most_free_ratio() -> float:
    """Return the highest utilization to propose without a printed figure of what is free."""
    return float(tables()["ceilings"]["most_free_ratio"])


def kind_of(gpu_name: str | None, *, on_wsl2: bool = False) -> str:
    """Return the kind of memory of a GPU: unified by its name, else by the host."""
    plain = "".join(c for c in (gpu_name or "").lower() if c.isalnum())
    for row in tables()["ceiling"]:
        if any(name in plain for name in row["gpus"]):
            return str(row["kind"])
    if on_wsl2:
        return "wsl2"
    return "discrete"


def free_at_start(total_bytes: int, kind: str, replicas: int = 1) -> tuple[int | None, str]:
    """Return the bytes that are free for one engine, and what says so; None for all but the CUDA
    context.

    Args:
        total_bytes: the memory of the GPU.
        kind: one of ``KINDS``.
        replicas: engines that take turns on a time-sliced GPU; nothing but they themselves divides
            its memory.

    Raises:
        SettingError: the kind is not known.
    """
    if kind not in KINDS:
        raise SettingError(f"memory_kind is {kind!r}", hint=f"one of {', '.join(KINDS)}")
    ratio = next(
        (float(row["free_ratio"]) for row in tables()["ceiling"] if row["kind"] == kind), None
    )
    if ratio is None and replicas == 1:
        return None, ""
    free = round((1.0 if ratio is None else ratio) * total_bytes / replicas)
    if ratio is not None:
        said = [f"{ratio:.0%} of a device with {kind} memory is free at a start"]
    else:
        said = []
    said += [f"{replicas} replicas share it evenly"] if replicas > 1 else []
    return free, ", ".join(said)
