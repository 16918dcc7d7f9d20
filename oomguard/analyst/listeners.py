"""Find out from /proc which processes listen at an address, without network traffic."""

from __future__ import annotations

import ipaddress
import os
import pwd
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.core.presentable import process_list
from oomguard.engines.server import ListenAddress
from oomguard.supervisor.tree import pids

_PROC: Final = Path("/proc")


def processes_with_open(is_wanted: Callable[[str], bool]) -> set[int]:
    """Return the readable processes that have a matching file or socket open.

    Args:
        is_wanted: receives the target of each descriptor: a path, or ``socket:[number]``.
    """
    return {pid for pid, target in _open_files() if is_wanted(target)}


def _open_files() -> Iterator[tuple[int, str]]:
    for pid in pids():
        try:
            for link in (_PROC / str(pid) / "fd").iterdir():
                yield pid, str(link.readlink())
        except OSError:  # the process has ended, or belongs to another user
            continue


_NET: Final = Path("/proc/net")
_LISTENS: Final = "0A"  # TCP_LISTEN, include/net/tcp_states.h
_ACCEPTS: Final = 1 << 16  # __SO_ACCEPTCON, include/uapi/linux/net.h
_ANY: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - only compared


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    """Describe a listening socket: its inode, its address, and its user if known."""

    inode: int
    bound: ListenAddress
    uid: int | None


def describe_listeners(address: ListenAddress) -> str:
    """Describe who listens at an address."""
    found = list(_on_path(address.path) if address.path is not None else _on_port(address))
    if not found:
        return "unknown, because /proc does not show it"
    sockets = {f"socket:[{listener.inode}]" for listener in found}
    pids = processes_with_open(sockets.__contains__)
    if pids:
        return process_list(sorted(pids))
    others = sorted(
        {_user(listener.uid) for listener in found if listener.uid not in {None, os.geteuid()}}
    )
    if others:
        return f"a process of {', '.join(others)}, which this user cannot inspect"
    return "a process that this user cannot inspect"


def listening_at(address: ListenAddress) -> dict[ListenAddress, set[int]]:
    """Return the bound addresses that cover an address, with their readable processes."""
    if address.path is not None:
        found = _on_path(address.path)
    else:
        found = _on_port(address)
    return {
        listener.bound: processes_with_open(f"socket:[{listener.inode}]".__eq__)
        for listener in found
    }


def listens_on_path(path: str) -> bool:
    """Return whether a server accepts connections on a Unix socket, by connecting to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except BlockingIOError:  # its queue is full
            return True
        except ConnectionRefusedError:
            return False
        except OSError:  # no permission, or another kind of socket: /proc decides
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
    # all spellings under which it may be bound, including links
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
    """Convert an address from the kernel's format (four bytes in native order) to the usual one."""
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
        rows = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return set()
    return {str(row[4][0]) for row in rows}


def _user(uid: int | None) -> str:
    try:
        return f"user {pwd.getpwuid(uid or 0).pw_name}"
    except KeyError:
        return f"user {uid}"
