"""Serve HTTP on a small port for probes and scrapes, in one thread that no client can block."""

from __future__ import annotations

import contextlib
import io
import os
import re
import selectors
import socket
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Final

LOCAL: Final = "127.0.0.1"
ANY: Final = "*"
EVERYWHERE: Final = "::"
_LARGEST_PORT: Final = 65535
_ADDRESS: Final = re.compile(
    r"(?:(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:/]+)):)?(?P<port>[0-9]{1,5})"
)


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Hold the address of a small HTTP server; port 0 means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"


def parse_address(text: str, default_host: str) -> HttpAddress | None:
    """Return the address for ``[HOST:]PORT``, or None if the text is invalid.

    The host ``*`` means every address of this machine.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > _LARGEST_PORT:
        return None
    host = found["v6"] or found["host"] or default_host
    # getaddrinfo(3) resolves "*" to this machine alone, but users mean every address of it.
    everywhere = EVERYWHERE if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104
    return HttpAddress(everywhere if host == ANY else host, int(found["port"]))


def listening_at(address: HttpAddress) -> socket.socket:
    """Return a listening socket; early clients wait in its queue.

    Raises:
        OSError: the address is not available.
    """
    family, _, _, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )[0]
    # "::" means all addresses of both families, whatever the system's default is.
    both = address.host == EVERYWHERE and socket.has_dualstack_ipv6()
    return socket.create_server(place[:2], family=family, dualstack_ipv6=both)


MOST_CONNECTIONS: Final = 32
LIMIT_S: Final = 5.0
_MOST_BYTES: Final = 1 << 14
_END: Final = b"\r\n\r\n"


class _Connection:
    """Hold one client with its request and its answer."""

    def __init__(self, client: socket.socket, address: object) -> None:
        self.client = client
        self.address = address
        self.until_s = time.monotonic() + LIMIT_S
        self.request = b""
        self.answer = memoryview(b"")


class HttpPort:
    """Answer each request with a handler like the standard library's, then close the connection.

    A client that takes longer than ``LIMIT_S`` to send its request or read its answer is closed.
    With ``MOST_CONNECTIONS`` open connections, a new one closes the oldest.

    Args:
        listening: the socket, which is closed at the end.
        handler: answers a request in memory.
    """

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        self._listening = listening
        self._handler = handler
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, _Connection] = {}
        self._spare = os.open(os.devnull, os.O_RDONLY)
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ, None)

    def serve_forever(self) -> None:
        """Serve until the socket fails."""
        while True:
            for key, _ in self._selector.select(0.5 if self._open else None):
                if key.data is None:
                    self._accept()
                else:
                    self._go_on(key.data)
            now_s = time.monotonic()
            for connection in list(self._open.values()):
                if connection.until_s >= now_s:
                    continue
                self._close(connection)

    def _accept(self) -> None:
        try:
            client, address = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except (
            OSError
        ):  # no file descriptor is left: use the spare one to accept the client, and close it
            os.close(self._spare)
            with contextlib.suppress(OSError):
                self._listening.accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY)
            return
        if len(self._open) >= MOST_CONNECTIONS:
            self._close(next(iter(self._open.values())))
        client.setblocking(False)
        connection = self._open[client.fileno()] = _Connection(client, address)
        self._selector.register(client, selectors.EVENT_READ, connection)

    def _go_on(self, connection: _Connection) -> None:
        if self._open.get(connection.client.fileno()) is not connection:
            # It was closed for a newer one.
            return
        try:
            if not connection.answer:
                self._receive(connection)
            if connection.answer:
                connection.answer = connection.answer[connection.client.send(connection.answer) :]
                if not connection.answer:
                    self._close(connection)
        except BlockingIOError:
            self._selector.modify(connection.client, selectors.EVENT_WRITE, connection)
        except OSError:
            self._close(connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.client.recv(_MOST_BYTES)
        connection.request += data
        if not data or len(connection.request) > _MOST_BYTES:
            self._close(connection)
        elif _END in connection.request or b"\n\n" in connection.request:
            connection.answer = memoryview(
                _answered(self._handler, connection.request, connection.address)
            )
            if not connection.answer:
                self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._open.pop(connection.client.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.client)
        connection.client.close()


def _answered(handler: type[BaseHTTPRequestHandler], request: bytes, address: object) -> bytes:
    """Return the handler's answer to a request."""
    answer = io.BytesIO()

    class InMemory(handler):  # type: ignore[misc, valid-type]
        def setup(self) -> None:
            self.rfile = io.BytesIO(request)
            self.wfile = answer

        def finish(self) -> None:
            return

    InMemory(None, address, None)
    return answer.getvalue()
