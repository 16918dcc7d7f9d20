"""Which rank of which job this process is, as its launcher tells it by variables
(launchers.toml).
"""

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
class Launched:
    """This process among the ranks of its job.

    Attributes:
        rank: which it is, from 0.
        size: how many there are.
        launcher: who says so.
        job: what tells this job from others on the same hosts.
        local_rank: which it is on this host; None: not told.
        local_size: how many there are on this host; None: not told.
        address: where rank 0 can be reached, None where that is not told.
        port: of the address.
        keeps_store: whether the launcher keeps torch's store at the address.
        again: variables for a job that starts again, with ``{address}`` and ``{port}`` of rank 0 to
            fill in.
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
        """Whether all ranks are known to be on this host."""
        return self.local_size == self.size or (
            self.address is not None and _is_local(self.address)
        )


def launched(environ: Mapping[str, str], *, is_one_job: bool = False) -> Launched | None:
    """Return which rank of which job the environment says that this process is; None where it is
    none of several.

    Args:
        environ: the environment.
        is_one_job: whether the user says that what a launcher started together is one job; it may
            be of one rank then.
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
        return Launched(
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
    """Return whether an output ends with the words of a program that its launcher does not let
    start a second time.
    """
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
