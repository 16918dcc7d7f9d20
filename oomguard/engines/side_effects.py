"""Read the side effects of engines (requests, caches) from engines/<folder>/effects.toml."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from oomguard.core.files import read_tables
from oomguard.engines.command import Launch
from oomguard.engines.registry import launchers

# Shell syntax that joins several commands or redirects output into a file.
_DOES_MORE: Final = re.compile(r"[;&|<>`\n]|\$\(")
# Shell commands before the engine's that leave nothing behind.
_PREPARES: Final = re.compile(
    r"\A(?:\s*(?:cd|export|set|ulimit|umask|unset)\s[^;&|<>`\n$()]*(?:;|&&))+\s*"
)


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A log line of a served request; without ``counts`` it shows that some came, not how many."""

    anchor: bytes
    pattern: re.Pattern[bytes]
    counts: bool


@dataclass(frozen=True, slots=True)
class EngineEffects:
    """The effects of all engines: request lines, endpoints to ignore, and cache folders."""

    requests: tuple[RequestLine, ...]
    not_requests: frozenset[bytes]
    caches: tuple[str, ...]


@functools.cache
def engine_effects() -> EngineEffects:
    """Return the contents of all effects.toml files."""
    tables = list(_tables().values())
    rows = [row for table in tables for row in table.get("request", ())]
    return EngineEffects(
        tuple(
            RequestLine(
                r["anchor"].encode(), re.compile(r["pattern"].encode()), r.get("counts", True)
            )
            for r in rows
        ),
        frozenset(path.encode() for table in tables for path in table.get("not_requests", ())),
        tuple(folder for table in tables for folder in table.get("caches", ())),
    )


def is_server(launch: Launch) -> bool:
    """Return whether a command is only an engine's own server; a restart repeats no request."""
    own = next((engine for engine in launchers() if engine.is_own_command(launch.argv)), None)
    if own is None:
        return False
    lines = [_PREPARES.sub("", word, count=1) for word in launch.argv if " " in word]  # bash -c "…"
    texts = [line.split() for line in lines if not _DOES_MORE.search(line)]
    return any(_names_one(words, own.NAME) for words in ([*launch.argv], *texts))


def _names_one(words: list[str], engine: str) -> bool:
    servers = _tables().get(engine, {}).get("servers", ())
    return any([PurePath(one).name, other] in servers for one, other in itertools.pairwise(words))


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    files = sorted(Path(__file__).parent.glob("*/effects.toml"))
    return {table["engine"]: table for table in read_tables("effects", files).values()}
