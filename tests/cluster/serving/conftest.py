"""``vllm serve`` in small, under the real ``oomguard run``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.supervising import RUN, wait_for

LIMIT_S = 40  # what a machine under load may take
PROGRAM = Path(__file__).with_name("fake_serve.py")


@dataclass
class Served:
    """A run of the small server."""

    folder: Path
    process: subprocess.Popen[bytes]
    port: int
    connections: list[http.client.HTTPConnection] = field(default_factory=list)

    def order(self, name: str, text: str = "") -> None:
        (self.folder / "orders" / name).write_text(text)

    def forget(self, name: str) -> None:
        (self.folder / "orders" / name).unlink(missing_ok=True)

    def said(self) -> list[dict]:
        """Events of oomguard so far."""
        found = []
        for line in (self.folder / "errors").read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    def told(self, words: str) -> list[dict]:
        return [event for event in self.said() if words in event["event"]]

    def wait_for(self, words: str, count: int = 1) -> dict:
        assert wait_for(lambda: len(self.told(words)) >= count, LIMIT_S), (words, self.said())
        return self.told(words)[count - 1]

    def request(self) -> http.client.HTTPConnection:
        """Send a request, and wait for no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        self.connections.append(connection)
        connection.request("POST", "/v1/completions", "{}")
        return connection

    def starts(self) -> int:
        path = self.folder / "starts"
        return len(path.read_text().split()) if path.exists() else 0

    def end(self) -> int:
        """Stop the run as its user would."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


Serve = Callable[..., Served]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start runs of the small server, each with options of oomguard and flags of the server; those that are left are ended."""
    started: list[Served] = []

    def start(
        *options: str,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Served:
        port = free_port()
        (tmp_path / "orders").mkdir(exist_ok=True)
        (tmp_path / "vllm").unlink(missing_ok=True)
        (tmp_path / "vllm").symlink_to(PROGRAM)
        command = [sys.executable, str(tmp_path / "vllm"), "serve", "./tiny", "--port", str(port)]
        command += [
            "--orders",
            str(tmp_path / "orders"),
            "--starts",
            str(tmp_path / "starts"),
            *flags,
        ]
        with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
            process = subprocess.Popen(
                [*prefix, *RUN, "-v", "--log-format", "json", *options, "--", *command],
                stdout=out,
                stderr=errors,
                env={**os.environ, **(env or {})},
            )
        started.append(Served(tmp_path, process, port))
        return started[-1]

    yield start
    for served in started:
        for connection in served.connections:
            connection.close()
        if served.process.poll() is None:
            served.process.send_signal(signal.SIGTERM)
            try:
                served.process.wait(60)
            except subprocess.TimeoutExpired:
                served.process.kill()
                served.process.wait()
