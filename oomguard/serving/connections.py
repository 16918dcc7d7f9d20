"""Requests that wait for an answer, as the kernel tells of the connections to a server: nothing is sent to the server, nothing is read.

A server that counts nothing, or got stuck before it counted a request, still has the connection that the request came through. The kernel
knows for each when it last carried bytes in either direction (struct tcp_info of include/uapi/linux/tcp.h, asked for through
sock_diag(7)): bytes that came after the last ones that went out are a request without an answer, or the first part of one.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Final

_SOCK_DIAG: Final = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY
_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_ERROR, _DONE = 2, 3
_ESTABLISHED: Final = 1 << 1
_INFO: Final = 2  # INET_DIAG_INFO
_HEAD: Final = struct.Struct("=IHHII")  # struct nlmsghdr
_MESSAGE_BYTES: Final = 72  # struct inet_diag_msg, attributes follow
# Offsets in struct tcp_info: milliseconds since bytes were sent and received, how many were sent and confirmed, and how many came in all.
_SENT, _RECEIVED, _WENT, _CAME = 44, 52, 120, 128
_LIMIT_S: Final = 2.0


def unanswered_s(port: int) -> tuple[float, ...] | None:
    """Return for how many seconds each request at a local port waits; None where the kernel does not tell."""
    waits: list[float] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(_LIMIT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                kernel.send(_request(family, port))
                waits += [wait for message in _answers(kernel) if (wait := _wait_s(message, port)) is not None]
    except (OSError, AttributeError, struct.error):  # no such socket here, or another kernel
        return None
    return tuple(waits)


def _request(family: int, port: int) -> bytes:
    identity = struct.pack(">HH", port, 0) + bytes(32) + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED) + identity
    return _HEAD.pack(_HEAD.size + len(body), _BY_FAMILY, _DUMP, 1, 0) + body


def _answers(kernel: socket.socket) -> Iterator[bytes]:
    while True:
        data, at = kernel.recv(1 << 16), 0
        while at < len(data):
            length, kind, *_ = _HEAD.unpack_from(data, at)
            if kind == _DONE:
                return
            if kind == _ERROR or length < _HEAD.size:
                raise OSError("sock_diag does not answer")
            yield data[at + _HEAD.size : at + length]
            at += (length + 3) & ~3


def _wait_s(message: bytes, port: int) -> float | None:
    """Return how long the request of a connection waits; None where none does."""
    if struct.unpack_from(">H", message, 4)[0] != port:
        return None
    at = _MESSAGE_BYTES
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INFO and length - 4 >= _CAME + 8:
            info = message[at + 4 : at + length]
            (sent,), (received,) = struct.unpack_from("=I", info, _SENT), struct.unpack_from("=I", info, _RECEIVED)
            went, came = struct.unpack_from("=QQ", info, _WENT)
            # The kernel's clock ticks every few milliseconds: where both fell into one tick, a first request has had no byte back.
            return received / 1000 if came and (received < sent or not went) else None
        at += max(4, (length + 3) & ~3)
    return None
