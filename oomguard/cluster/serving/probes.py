"""Answer HTTP probes that detect a hang.

A server's own ``/health`` may answer 200 although its scheduler hangs.
"""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Final

from oomguard.core.http_port import HttpAddress, HttpPort, listening_at
from oomguard.core.log import get_logger

if TYPE_CHECKING:
    from oomguard.cluster.serving.health import Health


ALIVE: Final = "/livez"
READY: Final = "/readyz"
_OK = 200
_UNAVAILABLE = 503
_NOT_FOUND = 404


class Probes:
    """Answer probes until the process ends; also a companion of the run.

    Args:
        address: the address to listen at.
        health: the health monitor. None: the command is not a known server, so it is ready while it
            runs.

    Attributes:
        address: the address with the real port.

    Raises:
        OSError: the address is not available.
    """

    def __init__(self, address: HttpAddress, health: Health | None) -> None:
        self._health = health
        self._is_running = False
        listening = listening_at(address)
        self.address = HttpAddress(address.host, listening.getsockname()[1])
        threading.Thread(
            target=self._serve, args=(listening,), name="oomguard-probes", daemon=True
        ).start()

    def began(self, _number: int, _launch: object, _pid: int | None) -> None:
        """Record that the command runs."""
        self._is_running = True

    def ended(self, _attempt: object) -> None:
        """Record that no command runs until the next attempt."""
        self._is_running = False

    def answer(self, path: str) -> tuple[int, str]:
        """Return the status and text for a path."""
        if self._health is not None:
            wrong = self._health.wrong
        else:
            wrong = None
        if path == ALIVE:
            if wrong is None:
                return (_OK, "ok")
            return (_UNAVAILABLE, wrong)
        if path != READY:
            return _NOT_FOUND, f"{ALIVE} or {READY}"
        if wrong is not None:
            return _UNAVAILABLE, wrong
        if not self._is_running:
            return _UNAVAILABLE, "no attempt is running"
        if self._health is not None and not self._health.is_ready:
            return _UNAVAILABLE, "the server has not answered yet"
        return _OK, "ok"

    def _serve(self, listening: socket.socket) -> None:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, text = answer(self.path.partition("?")[0].rstrip("/") or "/")
                body = f"{text}\n".encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815 - the same

            def log_message(self, *_args: object) -> None:
                """Log nothing, because standard error belongs to the command."""

        try:
            HttpPort(listening, Handler).serve_forever()
        except OSError as error:
            get_logger().warning("probes are no longer answered", reason=str(error))
