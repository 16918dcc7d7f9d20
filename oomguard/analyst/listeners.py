"""Who listens at an address, read from /proc: no packet is sent and no program asked."""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.engines.server import ListenAddress
from oomguard.report.presentable import listed
from oomguard.supervisor.tree import pids

# Which processes of this machine have a file or a socket open.

_PROC: Final = Path("/proc")


def with_open(is_wanted: Callable[[str], bool]) -> set[int]:
    """Return the processes that have something open of which ``is_wanted`` holds, as far as they
    may be read.

    It is asked what a descriptor leads to: a path, or ``socket:[number]``.
    """
    return {pid for pid, target in _open_files() if is_wanted(target)}


def in_use(paths: Iterable[str]) -> set[str]:
    """Return those of some files that a process, as far as it may be read, has open or mapped."""
    wanted = set(paths)
    found = {target for _, target in _open_files() if target in wanted}
    for pid in pids():
        try:
            lines = (
                (_PROC / str(pid) / "maps")
                .read_text(encoding="utf-8", errors="replace")
                .splitlines()
            )
        except OSError:
            continue
        # Five fields stand before the path, which may hold spaces.
        found |= {path for line in lines if (path := line.split(None, 5)[-1].strip()) in wanted}
    return found


def _open_files() -> Iterator[tuple[int, str]]:
    for pid in pids():
        try:
            for link in (_PROC / str(pid) / "fd").iterdir():
                yield pid, str(link.readlink())
        except OSError:  # it has ended, or is another user's
            continue


_NET: Final = Path("/proc/net")
_LISTENS: Final = "0A"  # TCP_LISTEN, include/net/tcp_states.h
_ACCEPTS: Final = 1 << 16  # __SO_ACCEPTCON, include/uapi/linux/net.h
_ANY: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """A listening socket: its inode, where it is bound, and the user it belongs to where that is
    told.
    """

    inode: int
    bound: ListenAddress
    uid: int | None


def holders(address: ListenAddress) -> str:
    """Return who listens at an address, to read."""
    found = list(_on_path(address.path) if address.path is not None else _on_port(address))
    if not found:
        return "not told by /proc"
    sockets = {f"socket:[{listener.inode}]" for listener in found}
    pids = with_open(sockets.__contains__)
    if pids:
        return listed(sorted(pids))
    others = sorted(
        {_user(listener.uid) for listener in found if listener.uid not in {None, os.geteuid()}}
    )
    if others:
        return f"a process of {', '.join(others)}, not ours to read"
    return "a process that is not ours to read"


def listening_at(address: ListenAddress) -> dict[ListenAddress, set[int]]:
    """Return where sockets are bound that listen at an address, and their processes, as far as they
    may be read.
    """
    if address.path is not None:
        found = _on_path(address.path)
    else:
        found = _on_port(address)
    return {listener.bound: with_open(f"socket:[{listener.inode}]".__eq__) for listener in found}


def listens_on_path(path: str) -> bool:
    """Return whether a server is behind the file of a Unix socket, by connecting to it as its
    clients do.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except BlockingIOError:  # its queue is full
            return True
        except ConnectionRefusedError:
            return False
        except OSError:  # not ours to ask, or not this kind of socket: what stands in /proc counts
            return any(_on_path(path))
    return True


def _on_port(address: ListenAddress) -> Iterator[ListeningSocket]:
    ours = _resolved(address)
    for name in ("tcp", "tcp6"):
        for fields in _rows(name):
            place, _, port = fields[1].rpartition(":")
            if len(fields) > 9 and fields[3] == _LISTENS and int(port, 16) == address.port:
                theirs = _decoded(place)
                if theirs in _ANY or not ours or ours & _ANY or theirs in ours:
                    yield ListeningSocket(
                        int(fields[9]), ListenAddress(theirs, address.port), int(fields[7])
                    )


def _on_path(path: str) -> Iterator[ListeningSocket]:
    # as it may have been bound, links and all
    spelled = {path, os.path.abspath(path)}  # noqa: PTH100
    for fields in _rows("unix"):
        if len(fields) > 7 and fields[7] in spelled and int(fields[3], 16) & _ACCEPTS:
            yield ListeningSocket(int(fields[6]), ListenAddress(path=path), None)


def _rows(name: str) -> Iterator[list[str]]:
    try:
        lines = (_NET / name).read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return
    yield from (line.split(None, 7) if name == "unix" else line.split() for line in lines)


def _decoded(place: str) -> str:
    """Return an address as the kernel prints it, four bytes at a time in its own byte order, in its
    usual form.
    """
    packed = b"".join(
        int(place[start : start + 8], 16).to_bytes(4, sys.byteorder)
        for start in range(0, len(place), 8)
    )
    found = ipaddress.ip_address(packed)
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
    else:
        mapped = None
    return str(mapped or found)


def _resolved(address: ListenAddress) -> set[str]:
    try:
        told = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return set()
    return {str(row[4][0]) for row in told}


def _user(uid: int | None) -> str:
    try:
        return f"user {pwd.getpwuid(uid or 0).pw_name}"
    except KeyError:
        return f"user {uid}"
