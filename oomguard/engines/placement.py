"""How an engine is given a device, and how it tells that it has taken its memory, from its own data file (placement.toml)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from oomguard.user_files import read_tables

# What everything that uses CUDA reads, and what is assumed of an engine that has no file.
_EVERYWHERE: Final[dict[str, Any]] = {"uuid": False, "instance": "always", "why": ""}


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """What an engine reads in CUDA_VISIBLE_DEVICES.

    Attributes:
        uuid: whether a UUID may stand there; an index always may.
        instance: whether it starts on an instance of a divided GPU: always, never, or where the instance's number is also a GPU's.
        why: what happens where it does not.
    """

    uuid: bool
    instance: Literal["always", "never", "as_a_gpu"]
    why: str

    def takes_instance(self, number: int, gpus: int) -> bool:
        """Return whether it starts on the instance of this number, on a machine with so many GPUs."""
        return self.instance == "always" or (self.instance == "as_a_gpu" and number < gpus)


def visible_devices(engine: str, version: str | None) -> VisibleDevices:
    """Return what a version of an engine reads; what every version reads where the version is not known."""
    rows = _tables().get(engine, {}).get("visible", [_EVERYWHERE])
    found = rows[0]
    if version is not None:
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            own = Version(Version(version).base_version)
        except InvalidVersion:
            return VisibleDevices(bool(found["uuid"]), found["instance"], found["why"])
        found = [row for row in rows if own in SpecifierSet(row.get("versions", ">=0"))][-1]
    return VisibleDevices(bool(found["uuid"]), found["instance"], found["why"])


def started_words(engine: str) -> str | None:
    """Return the words by which an engine's log tells, once for each engine, that it has taken its memory; None where it has none."""
    words = _tables().get(engine, {}).get("started", {}).get("words")
    return None if words is None else str(words)


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    files = sorted(Path(__file__).parent.glob("*/placement.toml"))
    return {table["engine"]: table for table in read_tables("placement", files).values()}
