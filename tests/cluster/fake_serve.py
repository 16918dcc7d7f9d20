"""``vllm serve`` in small: its endpoints, counters and process titles (0.32), an engine that takes a step every 20 ms.

``--orders FOLDER`` holds what it is to do: a file named ``stuck`` stops its steps, ``chunks`` makes a request take steps that
count no token, ``dead`` ends the engine's process and leaves the server alive. ``--mode`` makes it another server: ``no counters`` as
with --disable-log-stats, ``other metrics``, ``no metrics``, ``binds nothing``, ``slow start``.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("serve")
parser.add_argument("model")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--uds")
parser.add_argument("--config")
parser.add_argument("--api-key")
parser.add_argument("--ssl-certfile")
parser.add_argument("--ssl-keyfile")
parser.add_argument("--orders", type=Path)
parser.add_argument("--mode", default="")
parser.add_argument("--starts", type=Path, help="gets a line a start")
parser.add_argument("--fails", type=int, default=0, help="so many starts end with status 3")
parser.add_argument("--disable-log-stats", action="store_true")
parser.add_argument(
    "--models", default=json.dumps({"data": [{"id": "./tiny"}]}), help="what /v1/models answers"
)
parser.add_argument("--completion", default="{}", help="what a request is answered with")
parser.add_argument("--stop-s", type=float, default=0.0, help="so long it takes to stop")
parser.add_argument(
    "--dies-of-term", action="store_true", help="as vLLM before its own handler stands"
)
args = parser.parse_args()
if args.starts:
    with args.starts.open("a") as file:
        file.write(f"{time.time()}\n")
    if len(args.starts.read_text().split()) <= args.fails:
        print("CUDA error: an illegal memory access was encountered", file=sys.stderr)
        sys.exit(3)


def ended() -> None:
    if args.dies_of_term:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)


def ordered(name: str) -> bool:
    return args.orders is not None and (args.orders / name).exists()


class Engine(threading.Thread):
    """Takes requests into its step, counts tokens, and answers after five steps."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.new: list[threading.Event] = []
        self.running: list[list] = []
        self.tokens = self.steps = 0

    def run(self) -> None:
        while True:
            time.sleep(0.02)
            if ordered("stuck"):
                continue
            self.running += [[5, done] for done in self.new]
            self.new.clear()
            for request in self.running:
                if ordered("chunks"):
                    self.steps += 1
                    continue
                request[0] -= 1
                self.tokens += 1
                if request[0] == 0:
                    request[1].set()
            self.running = [request for request in self.running if request[0] > 0]

    def metrics(self) -> str:
        label = '{engine="0",model_name="./tiny"}'
        return "".join(
            f"vllm:{name}{label} {value}\n"
            for name, value in {
                "num_requests_running": float(len(self.running)),
                "num_requests_waiting": 0.0,
                "kv_cache_usage_perc": self.steps / 1e6,
                "generation_tokens_total": float(self.tokens),
            }.items()
        )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, "")
        elif self.path == "/metrics" and args.mode != "no metrics":
            counted = "" if args.disable_log_stats else engine.metrics()
            self.answer(
                200,
                "other_total 1\n"
                if args.mode == "other metrics"
                else f"python_gc_total 1\n{counted}",
            )
        elif self.path == "/v1/models" and self.has_key():
            self.answer(200, args.models)
        else:
            self.answer(404, "")

    def has_key(self) -> bool:
        return args.api_key is None or self.headers.get("Authorization") == f"Bearer {args.api_key}"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.has_key():
            self.answer(401, "")
            return
        if args.completion != "{}":  # something before the engine answers
            self.answer(200, args.completion)
            return
        done = threading.Event()
        engine.new.append(done)
        done.wait(120)
        print('INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK', flush=True)
        with contextlib.suppress(OSError):  # who asked has given up
            self.answer(200, args.completion)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_UNIX if args.uds else socket.AF_INET

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", args.port


if args.mode == "slow start":
    for _ in range(60):
        sum(itertools.repeat(1, 2_000_000))
waits = "import os, time\nwhile os.getppid() == int(os.environ['PARENT']): time.sleep(0.05)"
env = {**os.environ, "PARENT": str(os.getpid())}
core = subprocess.Popen(["VLLM::EngineCore", "-c", waits], executable=sys.executable, env=env)
engine = Engine()
engine.start()
server = Server(
    ("127.0.0.1", 0) if args.mode == "binds nothing" else args.uds or (args.host, args.port),
    Handler,
)
if args.ssl_certfile:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
    server.socket = context.wrap_socket(server.socket, server_side=True)
signal.signal(signal.SIGTERM, lambda *_: (core.kill(), time.sleep(args.stop_s), ended()))
threading.Thread(target=server.serve_forever, daemon=True).start()
print(
    "(APIServer pid=1) INFO 11-22 04:20:27 [launcher.py:1] vllm INFO: Application startup complete.",
    flush=True,
)
while True:
    time.sleep(0.05)
    if ordered("dead") and core.poll() is None:
        core.kill()
        core.wait()
    if ordered("end"):
        core.kill()
        os._exit(int((args.orders / "end").read_text() or 0))
