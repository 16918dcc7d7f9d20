"""The measured constants of the memory model: one data file, a row for each range of versions, each with its source."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.errors import SettingError

if TYPE_CHECKING:
    from packaging.version import Version

_FILE: Final = Path(__file__).with_name("constants.toml")
_LATEST: Final = "0.33"


@functools.lru_cache(maxsize=1)
def tables() -> dict[str, Any]:
    """Return the whole data file."""
    import tomllib

    with _FILE.open("rb") as stream:
        return tomllib.load(stream)


def latest() -> Version:
    """Return the newest vLLM that is known here."""
    from packaging.version import Version  # with its specifiers 13 ms, which a diagnosis does without

    return Version(_LATEST)


def engine_version(text: str | None) -> Version:
    """Read a vLLM version, the newest known one for None; raises SettingError for what is no version."""
    from packaging.version import InvalidVersion, Version

    if text is None:
        return latest()
    try:
        return Version(text.removeprefix("v"))
    except InvalidVersion:
        raise SettingError(f"engine_version is {text!r}, not a version", hint="for example 0.30.0") from None


def constant(table: str, version: Version, **where: int) -> dict[str, Any]:
    """Return the row of a table for a version; of rows for several numbers of ranks the largest not above those asked for.

    Raises:
        SettingError: no row is for that version.
    """
    from packaging.specifiers import SpecifierSet

    rows = [
        row for row in tables()[table] if SpecifierSet(row["versions"]).contains(version.base_version, prereleases=True)
    ]
    rows = [row for row in rows if all(row.get(name, 1) <= value for name, value in where.items())]
    if not rows:
        raise SettingError(f"nothing is known of {table} in version {version}")
    found: dict[str, Any] = max(rows, key=lambda row: [row.get(name, 1) for name in where]) if where else rows[0]
    return found


def since(name: str, version: Version) -> bool:
    """Whether a behaviour of the defaults table was there in a version."""
    from packaging.version import Version

    return version >= Version(tables()["defaults"][name])


def reserved_ratio() -> float:
    """Return what the caching allocator holds beyond the tensors of a ``generate`` that is not replayed, as a share of them."""
    return float(tables()["generate"]["reserved_ratio"])


def gpu_total_bytes(name: str) -> int:
    """Return the total memory of a GPU by its name; raises SettingError with the known names."""
    wanted = _plain(name)
    found = {_plain(row["name"]): int(row["total_bytes"]) for row in tables()["gpu"]}
    if wanted in found:
        return found[wanted]
    known = ", ".join(row["name"] for row in tables()["gpu"])
    raise SettingError(f"unknown GPU: {name!r}", hint=f"known are {known}; or --gpu-memory 24GiB")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().removeprefix("nvidia") if c.isalnum()).removeprefix("geforce")
