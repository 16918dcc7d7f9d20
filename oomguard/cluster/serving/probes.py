"""Probes over HTTP that see a hang: answered by the run, for a server whose own ``/health`` answers
200 on a stuck scheduler.
"""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Final

from oomguard.core.log import get_logger
from oomguard.telemetry.http_server import HttpPort
from oomguard.telemetry.run_metrics import MetricsAddress, listening_at

if TYPE_CHECKING:
    from oomguard.cluster.serving.health import Health


ALIVE: Final = "/livez"
READY: Final = "/readyz"
_OK = 200
_UNAVAILABLE = 503
_NOT_FOUND = 404


class Probes:
    """Answers probes until the process ends; heard of attempts as a companion.

    Args:
        address: where it listens.
        health: of the server; None: the command is none that is known, and is ready while it runs.

    Attributes:
        address: with the port that it has.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, address: MetricsAddress, health: Health | None) -> None:
        self._health = health
        self._is_running = False
        listening = listening_at(address)
        self.address = MetricsAddress(address.host, listening.getsockname()[1])
        threading.Thread(
            target=self._serve, args=(listening,), name="oomguard-probes", daemon=True
        ).start()

    def began(self, _number: int, _launch: object, _pid: int | None) -> None:
        """Note that the command runs."""
        self._is_running = True

    def ended(self, _attempt: object) -> None:
        """Note that it does not, until another attempt begins."""
        self._is_running = False

    def answer(self, path: str) -> tuple[int, str]:
        """Return status and text for a path."""
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
            return _UNAVAILABLE, "no attempt runs"
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
                """Say nothing: standard error is the command's."""

        try:
            HttpPort(listening, Handler).serve_forever()
        except OSError as error:
            get_logger().warning("probes are not answered any more", reason=str(error))
