"""Find out which rank of a job this process is, and where the ranks meet."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final
from urllib.parse import urlsplit

from oomguard.cluster.ranks.messages import OWN_NAME, MessageFolder
from oomguard.core.errors import UsageError
from oomguard.core.files import read_tables
from oomguard.core.log import get_logger
from oomguard.supervisor.process import inherited

# Find the place where the ranks of a job meet. It is a folder that all ranks see, or one folder
# for each host, mirrored through a store. The launcher offers the store: torch's TCPStore, which
# torchrun's agent keeps, or Ray's key-value store.

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
        # urlsplit rejects a port that is not a number.
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


# Detect the rank from the environment variables of the launcher (launchers.toml).

_FILE: Final = Path(__file__).with_name("launchers.toml")
# The message is among the last lines.
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
        rank = _count(environ.get(row["rank"]))
        size = _count(environ.get(row["size"]))
        if rank is None or size is None or not all(map(environ.get, needed)):
            continue
        if size < (1 if is_one_job else 2) or rank >= size:
            return None
        local_rank = _count(environ.get(row.get("local_rank", "")))
        local_size = _count(environ.get(row.get("local_size", "")))
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
            bool(store) and store.items() <= environ.items(),
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


# Start the helper process that mirrors a host's messages to other hosts.
# It runs on a Python that has the library of the store.

_CHILD: Final = Path(__file__).with_name("mirror_process.py")
# After its standard input ends, it gets this time to store the last messages.
_END_S: Final = 5.0
# A store that can be reached accepts at once.
_ANSWER_S: Final = 1.0
# The error of torch's TCPStore if it cannot listen: DistNetworkError with an errno's name or text.
_IN_USE: Final = re.compile("EADDRINUSE|address already in use", re.IGNORECASE)
_TAKEN: Final = (
    "another program uses the port; choose a free one, the same for all ranks: --rendezvous "
    "tcp://HOST:PORT"
)


class StoreMirror:
    """Control the helper of one host.

    Args:
        rendezvous: the place where the ranks meet, with the store to mirror.
        folder: the messages of this host.
        argv: the command. If oomguard's Python lacks the library, the command's Python is used.
    """

    def __init__(self, rendezvous: Rendezvous, folder: MessageFolder, argv: Sequence[str]) -> None:
        store = rendezvous.store
        assert store is not None  # noqa: S101 - only such a rendezvous is mirrored
        asked = asdict(store) | {
            "keeps": rendezvous.keeps_store,
            "here": str(folder.here),
            "there": str(folder.there),
            "size": rendezvous.launched.size,
            "puts": None if rendezvous.is_only_mirror else [str(rendezvous.launched.rank)],
        }
        self._ready = folder.there / f"ready-{rendezvous.launched.rank}"
        asked["ready"] = str(self._ready)
        self._why_ended: str | None = None
        if store.is_kept_by_rank_0 or store.address is None:
            self._place = None
        else:
            self._place = (store.address, store.port)
        if store.address is None:
            place = ""
        else:
            place = f" at {store.address}:{store.port}"
        self._named = f"the {store.kind} store{place}"
        self._process = subprocess.Popen(
            [_python(store.kind, argv), str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=inherited(),
            text=True,
            # Ctrl-C is for the command.
            start_new_session=True,
        )
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None  # noqa: S101
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()

    def problem(self) -> str | None:
        """Return why mirroring stopped, or None while it works."""
        if self._process.poll() is None:
            if self._ready.exists():
                return None
            return f"{self._named} was not reached"
        return self.why_ended()

    def why_apart(self) -> str | None:
        """Return why no rank of another host can be reached, or None while one may come."""
        if (ended := self.why_ended()) is not None or self._place is None or self._ready.exists():
            return ended
        try:
            socket.create_connection(self._place, timeout=_ANSWER_S).close()
        except OSError as error:
            return f"{self._named} was not reached: {error.strerror or error}"
        return None

    def why_ended(self) -> str | None:
        """Return why the helper ended on its own, or None while it runs."""
        if self._process.poll() is None:
            return None
        if self._why_ended is None:
            if self._process.stderr is not None:
                errors = self._process.stderr.read()
            else:
                errors = ""
            last = "it ended"
            for line in reversed(errors.splitlines()):
                if line.strip():
                    last = line.strip()
                    break
            if _IN_USE.search(last):
                self._why_ended = f"{self._named}: {_TAKEN}"
            else:
                self._why_ended = last
        return self._why_ended

    def close(self) -> None:
        """Stop the helper after the last messages are stored."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # A store that no longer answers must not keep the job from ending.
            get_logger().debug("killed the mirror of the ranks, which did not end")
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _python(kind: str, argv: Sequence[str]) -> str:
    """Return oomguard's Python if it has the store's library, otherwise the command's."""
    if importlib.util.find_spec(kind) is not None:
        return sys.executable
    if PurePath(argv[0]).name.startswith("python"):
        named = argv[0]
    else:
        named = "python3"
    return shutil.which(named) or sys.executable
