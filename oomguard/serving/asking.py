"""One question to a server on this machine, over TCP, TLS or a Unix socket, answered in time or not at all."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.engines.listening import Address

OK: Final = 200
NOBODY: Final = "nobody listens"
ANSWER_S: Final = 10.0  # what a healthy front answers within
_MOST_BYTES: Final = 16 << 20
_ANY: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where it listens, and where it is asked


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the status, and the text."""

    status: int
    text: str


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is asked, and with what key; over TLS no certificate is checked, as the server is our own command."""

    address: Address
    tls: bool = False
    key: str | None = None

    def ask(self, path: str, *, limit_s: float, body: Mapping[str, Any] | None = None) -> Answer | str:
        """Return the answer, or in a word why none came within ``limit_s``."""
        until_s = time.monotonic() + limit_s
        connection = self._connection(limit_s)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                headers["Content-Type"] = "application/json"
                connection.request("POST", path, json.dumps(body), headers)
            if connection.sock is not None:  # what connecting took is gone
                connection.sock.settimeout(max(0.1, until_s - time.monotonic()))
            response = connection.getresponse()
            return Answer(response.status, response.read(_MOST_BYTES).decode("utf-8", "replace"))
        except TimeoutError:
            return "no answer in time"
        except ConnectionRefusedError:
            return NOBODY
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def _connection(self, limit_s: float) -> http.client.HTTPConnection:
        if self.address.path is not None:
            return _OverUnix(self.address.path, limit_s)
        host, port = _ANY.get(self.address.host, self.address.host), self.address.port
        if not self.tls:
            return http.client.HTTPConnection(host, port, timeout=limit_s)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(host, port, timeout=limit_s, context=context)
