"""Find what a command's server does, from data files: its address, its endpoints, its side effects.

Side effects are requests that its log shows, and the caches that the engine writes.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

from oomguard.core.files import read_tables
from oomguard.core.settings import table_of
from oomguard.engines.command import Launch
from oomguard.engines.registry import launchers
from oomguard.engines.unwrap_command import Unread

_LARGEST_PORT: Final = 65535
_DIGITS: Final = 5


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address that a server binds: host ("": all IPv4) and port, or a Unix socket's path."""

    host: str = ""
    port: int = 0
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return self.path
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host or '0.0.0.0'}:{self.port}"  # noqa: S104 - shown, not bound


def address_of(argv: tuple[str, ...], engine: str) -> ListenAddress | None:
    """Return the address that a command binds.

    None if it starts no server of this engine, or if the address is unknown.
    """
    row = table_of(engine, "server")
    rest = _after_the_program(argv, row.get("programs", ()))
    if rest is None or has_flag(rest, row["silent_flags"]):
        return None
    path = flag_value(rest, row["path_flag"])
    if path:
        return ListenAddress(path=path)
    host = flag_value(rest, row["host_flag"])
    port = flag_value(rest, row["port_flag"])
    # The config file may set the missing part, and is not read here.
    if has_flag(rest, row["config_flags"]) and (host is None or port is None):
        return None
    if port is None and any(isinstance(word, Unread) for word in rest):
        # A shell expansion may contain the port.
        return None
    if port is None:
        number = row["port"]
    elif port.isdecimal() and len(port) <= _DIGITS:
        number = int(port)
    else:
        number = 0
    if 0 < number <= _LARGEST_PORT:
        return ListenAddress(host or "", number)
    return None


def _after_the_program(argv: tuple[str, ...], programs: list[list[str]]) -> tuple[str, ...] | None:
    """Return the words after the program's name; None for another program."""
    names = [PurePath(word).name for word in argv]
    if names and names[0].startswith("python"):
        skipped = 1
    else:
        skipped = 0
    for program in programs:
        if program[0] != "-m" or skipped:
            start = skipped
        else:
            start = len(names)
        if names[start : start + len(program)] == program:
            return argv[start + len(program) :]
    return None


def has_flag(words: tuple[str, ...], flags: list[str]) -> bool:
    """Return whether the command has one of these flags."""
    return any(word.partition("=")[0] in flags for word in words)


def flag_value(words: tuple[str, ...], flag: str) -> str | None:
    """Return a flag's value, the last one if repeated, as in argparse; None without one."""
    value = None
    for index, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == flag:
            if equals:
                value = text
            else:
                value = next(iter(words[index + 1 : index + 2]), None)
    return value


# --- serving.toml: how an engine's server reports its state ---


@dataclass(frozen=True, slots=True)
class ServingNames:
    """One engine's names in serving.toml; the head of that file explains them.

    Attributes:
        metrics: the names in /metrics.
        http: the endpoints, with the flags for TLS and API keys.
        processes: the titles of the engine's processes.
    """

    metrics: Mapping[str, Any]
    http: Mapping[str, Any]
    processes: Mapping[str, Any]

    def counts_nothing(self, argv: tuple[str, ...]) -> bool:
        """Return whether the command turns the engine's metrics off."""
        return has_flag(argv, self.metrics["off_flags"])

    def speaks_tls(self, argv: tuple[str, ...]) -> bool:
        """Return whether the server uses TLS."""
        return has_flag(argv, self.http["tls_flags"])

    def key(self, argv: tuple[str, ...], environ: Mapping[str, str]) -> str | None:
        """Return the API key that a request needs; None without one."""
        return (
            flag_value(argv, self.http["key_flag"])
            or environ.get(self.http["key_variable"])
            or None
        )


@functools.cache
def serving_names(engine: str) -> ServingNames | None:
    """Return the names for an engine's servers; None if the engine has no serving.toml."""
    files = sorted(Path(__file__).parent.glob("*/serving.toml"))
    for table in read_tables("serving", files).values():
        if table["engine"] == engine:
            return ServingNames(table["metrics"], table["http"], table["processes"])
    return None


# --- effects.toml: servers, caches, and log lines of requests ---

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
    requests: list[RequestLine] = []
    not_requests: list[bytes] = []
    caches: list[str] = []
    for table in _tables().values():
        requests += map(_request_line, table.get("request", ()))
        not_requests += map(str.encode, table.get("not_requests", ()))
        caches += table.get("caches", ())
    return EngineEffects(tuple(requests), frozenset(not_requests), tuple(caches))


def _request_line(row: Mapping[str, Any]) -> RequestLine:
    pattern = re.compile(row["pattern"].encode())
    return RequestLine(row["anchor"].encode(), pattern, row.get("counts", True))


def is_server(launch: Launch) -> bool:
    """Return whether a command is only an engine's own server; a restart repeats no request."""
    for engine in launchers():
        if engine.is_own_command(launch.argv):
            break
    else:
        return False
    if _names_one(launch.argv, engine.NAME):
        return True
    for word in launch.argv:
        line = _PREPARES.sub("", word, count=1)
        # `bash -c "…"` has the server in one word.
        if " " in word and not _DOES_MORE.search(line) and _names_one(line.split(), engine.NAME):
            return True
    return False


def _names_one(words: Sequence[str], engine: str) -> bool:
    servers = _tables().get(engine, {}).get("servers", ())
    return any([PurePath(one).name, other] in servers for one, other in itertools.pairwise(words))


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    files = sorted(Path(__file__).parent.glob("*/effects.toml"))
    return {table["engine"]: table for table in read_tables("effects", files).values()}
