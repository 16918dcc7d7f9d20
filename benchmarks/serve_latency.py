"""Figure: latency of requests to the real `vllm serve` under `oomguard run`, each paired with one to the same server started bare.

Both serve, and all processes of the one that is not asked stand still: an idle engine takes time too. So a pair is answered within a
second on the same machine; who is asked first alternates, and each round starts both anew, in the other order. The figure is the
mean logarithm of the ratios, the middle 80 % of the pairs, with a 95 % interval by bootstrap. Needs .venv-vllm.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from support.commands import ROOT, oomguard_command
from support.figure import conclude, skip
from support.paired import interval, trimmed

WIDTH_GOAL, RATIO_GOAL = 0.02, 1.01
START_S, WARM_UP, TOKENS = 240, 20, 48


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server that can be made to stand still, with all that it started and that started it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        top = psutil.Process(process.pid)
        self._processes = [top, *top.children(recursive=True)]  # a parent stops first and goes on last

    def stand_still(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def server(prefix: list[str], folder: Path, name: str, env: dict[str, str]) -> Iterator[Server]:
    """Start a server that logs into a file, yield it with a connection that stays open, and stop it."""
    port = free_port()
    flags = ["--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "16000000", "--port", str(port)]
    command = [*prefix, "vllm", "serve", "./tiny", "--dtype", "float16", *flags]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            yield Server(process, connected(process, port, folder / f"{name}.log"))
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def connected(process: subprocess.Popen[bytes], port: int, log: Path) -> http.client.HTTPConnection:
    """Wait until the server answers; the connection returned opens with its first request."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.suppress(OSError):
            connection.request("GET", "/health")
            connection.getresponse().read()
            connection.close()  # the server would, while the other one starts
            return connection
        time.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")


def latency_s(connection: http.client.HTTPConnection) -> float:
    """Seconds that one completion takes."""
    body = {"model": "./tiny", "prompt": "the quick brown", "max_tokens": TOKENS, "ignore_eos": True}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    took = time.perf_counter() - began
    if answer["usage"]["completion_tokens"] != TOKENS:
        raise SystemExit(f"an answer of another length: {answer}")
    return took


def round_of(
    pairs: int, prefixes: list[list[str]], folder: Path, env: dict[str, str], *, second_first: bool
) -> list[float]:
    """Start both servers, ask each ``pairs`` times, and return the logarithms of second over first."""
    order = (1, 0) if second_first else (0, 1)
    logs = []
    with contextlib.ExitStack() as started:
        servers = {
            number: started.enter_context(server(prefixes[number], folder, str(number), env)) for number in order
        }
        for each in servers.values():
            started.callback(each.go_on)
            each.stand_still()
        for i in range(WARM_UP + pairs):
            took = {}
            for number in (0, 1) if i % 2 else (1, 0):
                servers[number].go_on()
                took[number] = latency_s(servers[number].connection)
                servers[number].stand_still()
            if i >= WARM_UP:
                logs.append(math.log(took[1] / took[0]))
    return logs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="pairs of requests in a round (default 200)")
    parser.add_argument("--rounds", type=int, default=2, help="how often both servers are started (default 2)")
    parser.add_argument("--control", action="store_true", help="start the second server bare too: what the method sees")
    options = parser.parse_args()
    binaries = ROOT / ".venv-vllm" / "bin"
    if not (binaries / "vllm").is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OOMGUARD_", "VLLM_"))}
    environment |= {"PATH": f"{binaries}{os.pathsep}{environment['PATH']}", "HF_HUB_OFFLINE": "1"}
    prefix = [] if options.control else [*oomguard_command(), "run", "--"]
    logs: list[float] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            env = {**environment, "XDG_STATE_HOME": str(folder / "state")}
            maker = ["python", str(ROOT / "examples" / "make_tiny_model.py"), "tiny"]
            subprocess.run(maker, cwd=folder, env=env, check=True, capture_output=True)
            logs += round_of(options.pairs, [[], prefix], folder, env, second_first=bool(number % 2))
    ratio, (low, high) = math.exp(trimmed(logs)), interval(logs)
    half = (high - low) / 2
    conclude(
        f"latency of {len(logs)} requests under oomguard run beside a bare vllm serve: {ratio:.3f}, 95 % interval {low:.3f} to "
        f"{high:.3f}, +- {half:.1%} (goal: at most +- {WIDTH_GOAL:.0%}, not wholly beyond {RATIO_GOAL})",
        met=half <= WIDTH_GOAL and low <= RATIO_GOAL,
    )


if __name__ == "__main__":
    main()
