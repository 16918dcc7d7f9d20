"""A small HTTP server for probes and scrapes: one thread, few connections, and none that keeps it
waiting.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Final

from oomguard.core.log import get_logger
from oomguard.telemetry.metrics import Exporter, registry_of
from oomguard.telemetry.run_metrics import EVERYWHERE, MetricsAddress, listening_at

# Metrics over HTTP: the port is taken before the command starts, the library is loaded once it
# runs.

# An address to listen at that is none to open.
_OPENED: Final = {"0.0.0.0": "127.0.0.1", EVERYWHERE: "::1"}  # noqa: S104


class Endpoint:
    """Serves the metrics of one run until the process ends.

    Args:
        address: where it listens.
        exporter: what it serves.

    Attributes:
        address: with the port that it has.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, address: MetricsAddress, exporter: Exporter) -> None:
        self._socket: socket.socket | None = listening_at(address)
        self.address = MetricsAddress(address.host, self._socket.getsockname()[1])
        self._exporter = exporter

    def update(self) -> None:
        """Answer from here on; what came before waits in the socket's queue. A scrape reads for
        itself what is new.
        """
        if self._socket is not None:
            listening = self._socket
            self._socket = None
            threading.Thread(
                target=self._serve, args=(listening,), name="oomguard-metrics", daemon=True
            ).start()

    @property
    def url(self) -> str:
        """Where this machine opens it."""
        opened = MetricsAddress(
            _OPENED.get(self.address.host, self.address.host), self.address.port
        )
        return f"http://{opened}/metrics"

    def _serve(self, listening: socket.socket) -> None:
        try:
            _server(listening, self._exporter).serve_forever()
        except Exception as error:  # noqa: BLE001
            # an installation of the library that is broken raises anything
            listening.close()
            get_logger().warning(
                "no metrics are served: the run goes on without",
                reason=f"{type(error).__name__}: {error}",
            )


def _server(listening: socket.socket, exporter: Exporter) -> HttpPort:
    from prometheus_client import MetricsHandler

    class Handler(MetricsHandler):
        registry = registry_of(exporter)

        def do_HEAD(self) -> None:  # noqa: N802 - the name that http.server calls
            """Answer as to GET, without the body."""
            answering = self.wfile
            self.wfile = io.BytesIO()
            self.do_GET()
            answer = self.wfile.getvalue()
            self.wfile = answering
            head, end, _ = answer.partition(b"\r\n\r\n")
            self.wfile.write(head + end)

    return HttpPort(listening, Handler)


MOST_CONNECTIONS: Final = 32
LIMIT_S: Final = 5.0
_MOST_BYTES: Final = 1 << 14
_END: Final = b"\r\n\r\n"


class _Connection:
    """One client: what it has sent, then what it is sent."""

    def __init__(self, client: socket.socket, address: object) -> None:
        self.client = client
        self.address = address
        self.until_s = time.monotonic() + LIMIT_S
        self.request = b""
        self.answer = memoryview(b"")


class HttpPort:
    """Answers each request by a handler of the standard library's kind, and closes its connection.

    A client that has not sent its request, or not taken its answer, within ``LIMIT_S`` is closed,
    and the oldest one where ``MOST_CONNECTIONS`` are open and another one comes.

    Args:
        listening: the socket; it is closed at the end.
        handler: answers a request, from memory into memory.
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
            for connection in [one for one in self._open.values() if one.until_s < now_s]:
                self._close(connection)

    def _accept(self) -> None:
        try:
            client, address = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except (
            OSError
        ):  # no descriptor is left: take the client with the one that is kept for it, and close it
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
            return  # it was closed for a newer one
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
    """Return what a handler writes for a request."""
    answer = io.BytesIO()

    class InMemory(handler):  # type: ignore[misc, valid-type]
        def setup(self) -> None:
            self.rfile = io.BytesIO(request)
            self.wfile = answer

        def finish(self) -> None:
            return

    InMemory(None, address, None)
    return answer.getvalue()
