"""Where the ranks of a job meet: a folder that all of them see, or one a host, mirrored through a
store that all hosts reach.

The store is what the launcher offers: torch's (TCPStore), which torchrun's agent keeps already, or
Ray's key-value store.
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

from oomguard.cluster.ranks.launcher import Launched
from oomguard.cluster.ranks.messages import OWN_NAME
from oomguard.core.errors import UsageError

_LAST_PORT: Final = 65535
_FORMS: Final = "a folder that all ranks see, tcp://HOST:PORT, or ray[://HOST:PORT]"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store that hosts reach.

    Attributes:
        kind: ``torch`` or ``ray``.
        address: where; None: Ray's own search.
        port: of the address.
        is_kept_by_rank_0: whether rank 0 has to keep it; else the launcher does.
        prefix: what the keys of this job begin with.
    """

    kind: str
    address: str | None
    port: int | None
    is_kept_by_rank_0: bool
    prefix: str


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where this rank meets the others.

    Attributes:
        launched: which rank it is.
        folder: where the documents lie on this host.
        store: what mirrors the folder to other hosts; None: all ranks see it.
        mirrors: whether this rank mirrors for its host.
        is_only_mirror: whether it mirrors for all ranks of its host; else each does for itself, as
            nothing tells who is there.
        problem: why the ranks cannot meet, as far as that is known before; the command runs all the
            same.
    """

    launched: Launched
    folder: Path
    store: StoreAddress | None = None
    mirrors: bool = False
    is_only_mirror: bool = False
    problem: str | None = None

    @property
    def keeps_store(self) -> bool:
        """Whether this rank keeps the store from which the others read."""
        return (
            self.mirrors
            and self.store is not None
            and self.store.is_kept_by_rank_0
            and self.launched.rank == 0
        )

    def again(self) -> Mapping[str, str]:
        """Return the variables of a job that starts again, with an address and a free port of this
        rank filled in.
        """
        own = self.launched.again
        if not own:
            return {}
        place = {"address": self.address(), "port": str(free_port())}
        return {name: value.format(**place) for name, value in own.items()}

    def address(self) -> str:
        """Return where the other ranks reach this host."""
        named = self.launched.address
        if named is None or self.launched.is_on_one_host:
            return named or "127.0.0.1"
        with suppress(OSError), closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect((named, self.launched.port or 1))  # sends nothing, and has a route chosen
            return str(probe.getsockname()[0])
        return named


def rendezvous(launched: Launched, asked: str | None) -> Rendezvous:
    """Return where a rank meets the others.

    Args:
        launched: which rank it is.
        asked: what the user says; None: as the launcher offers.

    Raises:
        UsageError: what the user says cannot be understood.
    """
    if asked is not None:
        return _asked(launched, asked)
    shared = own_folder(launched)
    if launched.is_on_one_host:
        return Rendezvous(launched, shared)
    if launched.address is None or launched.port is None:
        why = f"{launched.launcher} does not tell where: --rendezvous names {_FORMS}"
        return Rendezvous(launched, shared, problem=why)
    beside = launched.port + (1 if launched.port < _LAST_PORT else -1)
    if launched.keeps_store:
        port = launched.port
    else:
        port = beside
    store = StoreAddress("torch", launched.address, port, not launched.keeps_store, _key(launched))
    return _mirrored(launched, store)


def own_folder(launched: Launched, name: str = "") -> Path:
    """Return the folder of a job on this host."""
    return Path(tempfile.gettempdir()) / f"{OWN_NAME}{os.geteuid()}" / f"{_key(launched)}{name}"


def free_port() -> int:
    """Return a port that nobody listens at."""
    with closing(socket.socket()) as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _asked(launched: Launched, asked: str) -> Rendezvous:
    parts = urlsplit(asked)
    if re.match(r"[a-z][a-z\d+.-]*://", asked) is None and asked != "ray":
        folder = Path(asked).absolute()
        around = (folder, *folder.parents)
        # Path.exists raises where we may not look
        there = next(path for path in around if os.path.exists(path))  # noqa: PTH110
        if not there.is_dir():
            raise UsageError(
                f"--rendezvous {asked}: {there} is no folder", hint=f"--rendezvous names {_FORMS}"
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
    raise UsageError(f"--rendezvous {asked}: not understood", hint=_FORMS)


def _mirrored(launched: Launched, store: StoreAddress) -> Rendezvous:
    """Return a folder for this host, which its first rank mirrors; each rank where nothing tells
    which that is.
    """
    place = hashlib.sha256(repr((store.kind, store.address, store.port)).encode()).hexdigest()[:8]
    folder = own_folder(launched, f"-{place}")
    if launched.local_rank is not None and launched.local_size is not None:
        return Rendezvous(launched, folder, store, launched.local_rank == 0, is_only_mirror=True)
    return Rendezvous(launched, folder, store, mirrors=True)


def _key(launched: Launched) -> str:
    told: Any = (launched.launcher, launched.job, launched.size)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
