"""Detect the rank of this process from its launcher's environment variables (launchers.toml)."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oomguard.core.files import read_tables

_FILE: Final = Path(__file__).with_name("launchers.toml")
_END_CHARS: Final = 16_384
_LOCAL_NAMES: Final = frozenset({"localhost", "localhost.localdomain"})


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Describe this process among the ranks of its job.

    Attributes:
        rank: its number, from 0.
        size: the number of ranks.
        launcher: the launcher that set the variables.
        job: an ID that distinguishes the job from others on the same hosts.
        local_rank: its number on this host, or None if unknown.
        local_size: the number of ranks on this host, or None if unknown.
        address: the address of rank 0, or None if unknown.
        port: the port at the address.
        keeps_store: whether the launcher keeps torch's store at the address.
        again: the variables of a restarted job, with ``{address}`` and ``{port}`` of rank 0 to fill
            in.
    """

    rank: int
    size: int
    launcher: str
    job: str = ""
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    keeps_store: bool = False
    again: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks are known to run on this host."""
        return self.local_size == self.size or (
            self.address is not None and _is_local(self.address)
        )


def detect_rank(environ: Mapping[str, str], *, is_one_job: bool = False) -> RankIdentity | None:
    """Return the rank that the environment describes, or None for a single process.

    Args:
        environ: the environment variables.
        is_one_job: whether the user says that all processes of the launcher form one job, which may
            have only one rank.
    """
    for row in _rows():
        needed = (*row.get("needs", ()), *(() if is_one_job else row.get("one_job", ())))
        rank, size = (_count(environ.get(row[name])) for name in ("rank", "size"))
        if rank is None or size is None or not all(environ.get(name) for name in needed):
            continue
        if size < (1 if is_one_job else 2) or rank >= size:
            return None
        local_rank, local_size = (
            _count(environ.get(row.get(name, ""))) for name in ("local_rank", "local_size")
        )
        store = row.get("store", {})
        return RankIdentity(
            rank,
            size,
            row["name"],
            "/".join(environ.get(name, "") for name in row["job"]),
            local_rank,
            local_size,
            environ.get("MASTER_ADDR") or None,
            _count(environ.get("MASTER_PORT")),
            bool(store) and all(environ.get(name) == value for name, value in store.items()),
            row.get("again", {}),
        )
    return None


def starts_once(tail: str) -> bool:
    """Return whether an output ends with the error of a program that starts only once."""
    end = tail[-_END_CHARS:].lower()
    return any(text in end for text in _table()["starts_once"])


def _rows() -> tuple[Mapping[str, Any], ...]:
    return tuple(_table()["launcher"])


@functools.cache
def _table() -> Mapping[str, Any]:
    return next(iter(read_tables("ranks_launchers", [_FILE]).values()))


def _count(text: str | None) -> int | None:
    if text is not None and text.isascii() and text.isdigit():
        return int(text)
    return None


def _is_local(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address in _LOCAL_NAMES
