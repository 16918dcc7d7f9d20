"""Serve the metrics of a run over HTTP."""

from __future__ import annotations

import io
import socket
import threading
from typing import Final

from oomguard.core.http_port import EVERYWHERE, HttpAddress, HttpPort, listening_at
from oomguard.core.log import get_logger
from oomguard.telemetry.metrics import Exporter, registry_of

# The port is taken before the command starts. prometheus-client is loaded while it runs.

# A client cannot connect to these listening addresses, but to their replacements.
_OPENED: Final = {"0.0.0.0": "127.0.0.1", EVERYWHERE: "::1"}  # noqa: S104


class Endpoint:
    """Serve the metrics of one run until the process ends.

    Args:
        address: the address to listen at.
        exporter: the metrics.

    Attributes:
        address: the address with the real port.

    Raises:
        OSError: the address is not available.
    """

    def __init__(self, address: HttpAddress, exporter: Exporter) -> None:
        self._socket: socket.socket | None = listening_at(address)
        self.address = HttpAddress(address.host, self._socket.getsockname()[1])
        self._exporter = exporter

    def update(self) -> None:
        """Start to answer requests; earlier ones wait in the socket's queue.

        Later calls do nothing, because each scrape reads the current figures.
        """
        if self._socket is not None:
            listening = self._socket
            self._socket = None
            threading.Thread(
                target=self._serve, args=(listening,), name="oomguard-metrics", daemon=True
            ).start()

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        opened = HttpAddress(_OPENED.get(self.address.host, self.address.host), self.address.port)
        return f"http://{opened}/metrics"

    def _serve(self, listening: socket.socket) -> None:
        try:
            _server(listening, self._exporter).serve_forever()
        except Exception as error:  # noqa: BLE001
            # a broken installation of prometheus-client may raise anything
            listening.close()
            get_logger().warning(
                "no metrics are served; the run continues without them",
                reason=f"{type(error).__name__}: {error}",
            )


def _server(listening: socket.socket, exporter: Exporter) -> HttpPort:
    from prometheus_client import MetricsHandler

    class Handler(MetricsHandler):
        registry = registry_of(exporter)

        def do_HEAD(self) -> None:  # noqa: N802 - the name that http.server calls
            """Answer like GET, without the body."""
            answering = self.wfile
            self.wfile = io.BytesIO()
            self.do_GET()
            answer = self.wfile.getvalue()
            self.wfile = answering
            head, end, _ = answer.partition(b"\r\n\r\n")
            self.wfile.write(head + end)

    return HttpPort(listening, Handler)
