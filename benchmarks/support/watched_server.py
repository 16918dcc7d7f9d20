"""A real `vllm serve` under `oomguard run --restart on-failure` that a plugin can stop."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.commands import ROOT, oomguard_command
from support.tiny_engine import engine_environment

PLUGIN = Path(__file__).parent / "hanging_engine"
START_S = 300


class WatchedServer:
    """The run: its events, its server, and its engine core."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.orders = folder / "orders"
        self._events = folder / "events"
        self.orders.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        options = [
            "--restart",
            "on-failure",
            "--hang-after",
            str(limit_s),
            "--max-per-hour",
            "1000",
            "--log-format",
            "json",
        ]
        serve = [
            "vllm",
            "serve",
            "./tiny",
            "--dtype",
            "float16",
            "--enforce-eager",
            "--max-model-len",
            "4096",
        ]
        serve += [
            "--kv-cache-memory-bytes",
            "64000000",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        environment = engine_environment(
            PLUGIN, HANGING_ORDERS=str(self.orders), XDG_STATE_HOME=str(folder / "state")
        )
        environment["PATH"] = f"{ROOT / '.venv-vllm' / 'bin'}{os.pathsep}{environment['PATH']}"
        with (folder / "log").open("wb") as log, self._events.open("wb") as events:
            self.process = subprocess.Popen(
                [*oomguard_command(), "run", *options, "--", *serve],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=events,
                start_new_session=True,
            )

    def events(self) -> list[dict]:
        """Return what oomguard has said so far; lines of the server stand between."""
        lines = self._events.read_text(errors="replace").splitlines()
        found = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return [event for event in found if isinstance(event, dict) and "event" in event]

    def told(self, words: str) -> list[dict]:
        """Return the events that hold these words."""
        return [event for event in self.events() if words in event["event"]]

    def wait_for(self, words: str, count: int, limit_s: float) -> bool:
        """Wait until so many events hold the words; return whether they came in time."""
        until_s = time.monotonic() + limit_s
        while len(self.told(words)) < count:
            if time.monotonic() > until_s or self.process.poll() is not None:
                return len(self.told(words)) >= count
            time.sleep(0.1)
        return True

    def ask(self, tokens: int, limit_s: float) -> int | None:
        """Return the status of one completion; None without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        body = {"model": "./tiny", "prompt": "the quick", "max_tokens": tokens, "ignore_eos": True}
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()

    def answers(self) -> bool:
        """Wait until the server answers a completion; return whether it did."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self.process.poll() is None:
            if self.ask(2, 30) == http.client.OK:
                return True
            time.sleep(0.5)
        return False

    def load(self, tokens: int) -> threading.Thread:
        """Begin a long completion."""
        thread = threading.Thread(target=self.ask, args=(tokens, 120), daemon=True)
        thread.start()
        return thread

    def core(self) -> psutil.Process:
        """Return the engine's process."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return next(one for one in below if one.cmdline() and "::EngineCore" in one.cmdline()[0])

    def end(self) -> None:
        """Stop it as its user would."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def watched_server(folder: Path, limit_s: float) -> Iterator[WatchedServer]:
    """Yield a run whose server is starting, and end it."""
    server = WatchedServer(folder, limit_s)
    try:
        yield server
    finally:
        server.end()
