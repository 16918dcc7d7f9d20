"""Read from placement.toml how each engine gets devices and reports that it has started."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from oomguard.core.files import read_tables
from oomguard.core.settings import table_of
from oomguard.engines.command import Launch, settings_given
from oomguard.engines.registry import launcher_of
from oomguard.engines.unwrap_command import inner_commands

# A multi-host engine gets its rank by flags; the engine's data file names them.


def ranks_in_command(launch: Launch) -> dict[str, Any] | None:
    """Return the rank that a command's flags give: rank, size, launcher, job, address, port.

    None if the command is not one of several ranks.
    """
    engine = launcher_of(launch)
    if not engine.is_own_command(launch.argv):
        return None
    for inner in inner_commands(launch.argv):
        words = [str(word) for word in inner.args]
        for way in table_of(engine.NAME, "ranks").get("ways", ()):
            found = _by(way, words, engine.NAME)
            if found is not None:
                return found
    return None


def _by(way: Mapping[str, Any], words: Sequence[str], engine: str) -> dict[str, Any] | None:
    size = _size(way, words, engine)
    each = _count(words, way.get("each", ()), 1)
    rank = _count(words, way["rank"], 0)
    if size is None or each is None or rank is None or each < 1:
        return None
    if size % each or rank % each or size <= each:
        return None
    if "each" in way and _value(words, way["each"]) is None:
        return None
    address = _value(words, way["address"]) or way["default_address"]
    port = _count(words, way["port"], way["default_port"])
    job = f"{address}:{port}"
    return {
        "rank": rank // each,
        "size": size // each,
        "launcher": way["name"],
        "job": job,
        "address": address,
        "port": port,
    }


def _size(way: Mapping[str, Any], words: Sequence[str], engine: str) -> int | None:
    """Return the number of ranks, from a flag or from a setting."""
    if "size" in way:
        return _count(words, way["size"], None)
    given = settings_given(words, engine, own=True).get(way["size_setting"])
    if given is not None and isinstance(given.value, int):
        return given.value
    return None


def _count(words: Sequence[str], flags: Sequence[str], default: int | None) -> int | None:
    text = _value(words, flags)
    if text is None:
        return default
    if text.isascii() and text.isdigit():
        return int(text)
    return None


def _value(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """Return a flag's value by any of its names, the last one if repeated; None without one."""
    value = None
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name.replace("_", "-") in flags:
            if equals:
                value = text
            else:
                value = next(iter(words[index + 1 : index + 2]), None)
    return value


# Every CUDA program accepts these; an engine without a file is assumed to do the same.
_EVERYWHERE: Final[dict[str, Any]] = {"uuid": False, "instance": "always", "why": ""}


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """What an engine accepts in CUDA_VISIBLE_DEVICES.

    Attributes:
        uuid: whether it accepts a UUID; it always accepts an index.
        instance: whether it starts on a MIG instance: always, never, or only if a GPU has the same
            number.
        why: what happens if it does not start on an instance.
    """

    uuid: bool
    instance: Literal["always", "never", "as_a_gpu"]
    why: str

    def takes_instance(self, number: int, gpus: int) -> bool:
        """Return whether it starts on the MIG instance of this number; ``gpus`` is their count."""
        return self.instance == "always" or (self.instance == "as_a_gpu" and number < gpus)


def visible_devices(engine: str, version: str | None) -> VisibleDevices:
    """Return what a version of an engine accepts.

    If ``version`` is None or not valid, return what every version accepts.
    """
    rows = _tables().get(engine, {}).get("visible", [_EVERYWHERE])
    found = rows[0]
    if version is not None:
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            own = Version(Version(version).base_version)
        except InvalidVersion:
            return VisibleDevices(bool(found["uuid"]), found["instance"], found["why"])
        # The last row that fits is the newest.
        for row in rows:
            if own in SpecifierSet(row.get("versions", ">=0")):
                found = row
    return VisibleDevices(bool(found["uuid"]), found["instance"], found["why"])


def started_words(engine: str) -> str | None:
    """Return the words that an engine logs once its memory is allocated; None without any."""
    words = _tables().get(engine, {}).get("started", {}).get("words")
    if words is None:
        return None
    return str(words)


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    files = sorted(Path(__file__).parent.glob("*/placement.toml"))
    return {table["engine"]: table for table in read_tables("placement", files).values()}
