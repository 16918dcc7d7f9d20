"""Which rank of a job a command is by its own flags, as an engine over several hosts is given them: from the engine's data file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oomguard.engines.command import Launch, settings_given
from oomguard.engines.inner_command import inner_commands
from oomguard.engines.known import launcher_of
from oomguard.surfaces import table_of


def ranks_in_command(launch: Launch) -> dict[str, Any] | None:
    """Return rank, size, launcher, job, address and port of a command that is one of several by its flags; None for any other."""
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
    size, each = _size(way, words, engine), _count(words, way.get("each", ()), 1)
    rank = _count(words, way["rank"], 0)
    if size is None or each is None or rank is None or each < 1 or size % each or rank % each or size <= each:
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
    """Return how many ranks there are, by a flag of its own or one that is a setting."""
    if "size" in way:
        return _count(words, way["size"], None)
    given = settings_given(words, engine, own=True).get(way["size_setting"])
    return given.value if given is not None and isinstance(given.value, int) else None


def _count(words: Sequence[str], flags: Sequence[str], default: int | None) -> int | None:
    text = _value(words, flags)
    if text is None:
        return default
    return int(text) if text.isascii() and text.isdigit() else None


def _value(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """Return the value of a flag by any of its names, of a repeated one the last; None where it is not given."""
    value = None
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name.replace("_", "-") in flags:
            value = text if equals else next(iter(words[index + 1 : index + 2]), None)
    return value
