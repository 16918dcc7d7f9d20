"""Find the place where the ranks of a job meet.

It is a folder that all ranks see, or one folder for each host, mirrored through a store. The
launcher offers the store: torch's TCPStore, which torchrun's agent keeps, or Ray's key-value store.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from oomguard.cluster.ranks.launcher import RankIdentity
from oomguard.cluster.ranks.messages import OWN_NAME
from oomguard.core.errors import UsageError

_LAST_PORT: Final = 65535
_FORMS: Final = "a folder that all ranks see, tcp://HOST:PORT, or ray[://HOST:PORT]"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Describe a store that all hosts reach.

    Attributes:
        kind: ``torch`` or ``ray``.
        address: its address. None: let Ray find it.
        port: the port at the address.
        is_kept_by_rank_0: whether rank 0 keeps it; otherwise the launcher does.
        prefix: the prefix of this job's keys.
    """

    kind: str
    address: str | None
    port: int | None
    is_kept_by_rank_0: bool
    prefix: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Describe where this rank meets the others.

    Attributes:
        launched: the rank and its job.
        folder: the folder of messages on this host.
        store: the store that mirrors the folder to other hosts. None: all ranks see the folder.
        mirrors: whether this rank mirrors for its host.
        is_only_mirror: whether it mirrors for all ranks of its host. If the local ranks are
            unknown, each rank mirrors only its own messages.
        problem: a known reason why the ranks cannot meet, or None. The command runs anyway.
    """

    launched: RankIdentity
    folder: Path
    store: StoreAddress | None = None
    mirrors: bool = False
    is_only_mirror: bool = False
    problem: str | None = None

    @property
    def keeps_store(self) -> bool:
        """Whether this rank keeps the store that the others read."""
        return (
            self.mirrors
            and self.store is not None
            and self.store.is_kept_by_rank_0
            and self.launched.rank == 0
        )

    def again(self) -> Mapping[str, str]:
        """Return the variables of a restarted job, with an address and a free port of this rank."""
        own = self.launched.again
        if not own:
            return {}
        place = {"address": self.address(), "port": str(free_port())}
        return {name: value.format(**place) for name, value in own.items()}

    def address(self) -> str:
        """Return the address at which other ranks reach this host."""
        named = self.launched.address
        if named is None or self.launched.is_on_one_host:
            return named or "127.0.0.1"
        with suppress(OSError), closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            # this sends nothing, it only chooses a route
            probe.connect((named, self.launched.port or 1))
            return str(probe.getsockname()[0])
        return named


def rendezvous(launched: RankIdentity, asked: str | None) -> Rendezvous:
    """Return where a rank meets the others.

    Args:
        launched: the rank and its job.
        asked: the value of ``--rendezvous``. None: use what the launcher offers.

    Raises:
        UsageError: the value is invalid.
    """
    if asked is not None:
        return _asked(launched, asked)
    shared = own_folder(launched)
    if launched.is_on_one_host:
        return Rendezvous(launched, shared)
    if launched.address is None or launched.port is None:
        why = f"{launched.launcher} does not set a meeting place: --rendezvous names {_FORMS}"
        return Rendezvous(launched, shared, problem=why)
    neighbor_port = launched.port + (1 if launched.port < _LAST_PORT else -1)
    if launched.keeps_store:
        port = launched.port
    else:
        port = neighbor_port
    store = StoreAddress("torch", launched.address, port, not launched.keeps_store, _key(launched))
    return _mirrored(launched, store)


def own_folder(launched: RankIdentity, name: str = "") -> Path:
    """Return the folder of a job on this host."""
    return Path(tempfile.gettempdir()) / f"{OWN_NAME}{os.geteuid()}" / f"{_key(launched)}{name}"


def free_port() -> int:
    """Return a free port."""
    with closing(socket.socket()) as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _asked(launched: RankIdentity, asked: str) -> Rendezvous:
    parts = urlsplit(asked)
    if re.match(r"[a-z][a-z\d+.-]*://", asked) is None and asked != "ray":
        folder = Path(asked).absolute()
        around = (folder, *folder.parents)
        # Path.exists raises an error for a folder that is not accessible.
        there = next(path for path in around if os.path.exists(path))  # noqa: PTH110
        if not there.is_dir():
            raise UsageError(
                f"--rendezvous {asked}: {there} is not a folder",
                hint=f"--rendezvous takes {_FORMS}",
            )
        return Rendezvous(launched, folder / f"{OWN_NAME}{_key(launched)}")
    try:
        host = parts.hostname
        port = parts.port
    except ValueError:
        host = port = None
    if asked == "ray" or (parts.scheme == "ray" and host and port):
        return _mirrored(launched, StoreAddress("ray", host, port, False, _key(launched)))
    if parts.scheme == "tcp" and host and port:
        return _mirrored(launched, StoreAddress("torch", host, port, True, _key(launched)))
    raise UsageError(f"--rendezvous {asked} is invalid", hint=_FORMS)


def _mirrored(launched: RankIdentity, store: StoreAddress) -> Rendezvous:
    """Return a folder for this host, which its first rank mirrors to other hosts.

    If the first rank is unknown, each rank mirrors its own messages.
    """
    place = hashlib.sha256(repr((store.kind, store.address, store.port)).encode()).hexdigest()[:8]
    folder = own_folder(launched, f"-{place}")
    if launched.local_rank is not None and launched.local_size is not None:
        return Rendezvous(launched, folder, store, launched.local_rank == 0, is_only_mirror=True)
    return Rendezvous(launched, folder, store, mirrors=True)


def _key(launched: RankIdentity) -> str:
    identity: Any = (launched.launcher, launched.job, launched.size)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
