"""Messages between oomguard and its watcher: a length, then the message; descriptors travel with the length."""

from __future__ import annotations

import marshal
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

_HEADER: Final = struct.Struct("=I")
# Standard streams and a pseudo-terminal.
_MOST_DESCRIPTORS: Final = 4


def send(channel: socket.socket, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
    """Write one message, whole; raises OSError where nobody reads."""
    body = marshal.dumps(message)
    header = _HEADER.pack(len(body))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
        channel.sendall(body)
    else:
        channel.sendall(header + body)


def receive(channel: socket.socket) -> tuple[tuple[Any, ...] | None, list[int]]:
    """Read one message and the descriptors that came with it; None at the end."""
    try:
        header, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, _MOST_DESCRIPTORS)
        for number in descriptors:
            os.set_inheritable(number, False)  # recv_fds leaves its flags argument out
        while header and len(header) < _HEADER.size:
            header += channel.recv(_HEADER.size - len(header))
        if not header:
            return None, []
        left, parts = _HEADER.unpack(header)[0], []
        while left:
            part = channel.recv(left)
            if not part:
                return None, descriptors
            parts.append(part)
            left -= len(part)
    except ConnectionError:
        return None, []
    return marshal.loads(b"".join(parts)), descriptors  # noqa: S302 - our own process wrote it
