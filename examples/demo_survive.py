"""A real vLLM server survives a request that does not fit: ten streams go on, one request fails.

The server's worker gets a memory limit from the kernel. The eleventh request asks for 500 logprobs
of each of its 30,000 prompt tokens, which needs more than that.
"""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

import psutil

ROOT = pathlib.Path(__file__).parents[1]
STREAMS = 10
TOKENS = 300
# What the worker may allocate after its start; the request needs twice as much.
SPARE_BYTES = 64 << 20


def main() -> None:
    env = {
        **os.environ,
        "PATH": f"{ROOT / '.venv-vllm' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        make = ["python", ROOT / "examples" / "make_tiny_model.py", "tiny"]
        subprocess.run(make, cwd=folder, env=env, check=True, capture_output=True)
        port = free_port()
        serve = (
            "vllm serve ./tiny --dtype float32 --max-model-len 32768 --max-logprobs 512 "
            f"--kv-cache-memory-bytes 200000000 --enforce-eager --port {port}"
        )
        command = ["oomguard", "run", "--", *serve.split()]
        print("$", " ".join(command), "> server.log   (about a minute)", flush=True)
        with open(f"{folder}/server.log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                show(f"http://127.0.0.1:{port}", process)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=90)
        lines = pathlib.Path(folder, "server.log").read_text(errors="replace").splitlines()
        print("\nIn the server's log:")
        for line in lines:
            if "oomguard: a step" in line or "oomguard: refused" in line:
                print("  " + line[line.index("oomguard: ") :])


def show(url: str, process: subprocess.Popen[bytes]) -> None:
    """Run the streams, the request that does not fit, and the health checks; print what came."""
    wait_until_healthy(url, process)
    limit_worker(process.pid)
    answers: list[dict[str, object]] = [{} for _ in range(STREAMS)]
    health: list[int] = []
    over = threading.Event()
    threads = [
        threading.Thread(target=stream, args=(url, number, answers[number]))
        for number in range(STREAMS)
    ]
    watch = threading.Thread(target=check_health, args=(url, health, over))
    for thread in (watch, *threads):
        thread.start()
    time.sleep(1.0)
    first = request(url, large_request())
    for thread in threads:
        thread.join()
    again = request(url, large_request())
    over.set()
    watch.join()
    complete = sum(one.get("tokens") == TOKENS for one in answers)
    print(f"{complete} of {STREAMS} streams gave their {TOKENS} tokens")
    longest_s = max(float(str(one["longest_s"])) for one in answers)
    print(f"longest pause between two tokens of a stream: {longest_s:.1f} s")
    for name, (status, body, took_s) in (("the request", first), ("the same again", again)):
        print(f"\n{name} -> HTTP {status} after {took_s:.1f} s\n{json.dumps(body, indent=1)}")
    print(f"\n/health: {health.count(200)} of {len(health)} answers were 200")


def large_request() -> dict[str, object]:
    """Return the request that does not fit."""
    chance = random.Random(1)
    prompt = [chance.randrange(5, 500) for _ in range(30_000)]
    return {"model": "./tiny", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 500}


def stream(url: str, number: int, answer: dict[str, object]) -> None:
    """Count the tokens of a stream, and measure its longest pause."""
    body = {
        "model": "./tiny",
        "prompt": [5 + number] * 40,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last_s = time.monotonic()
    longest_s = 0.0
    with urllib.request.urlopen(post(url, body), timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            now_s = time.monotonic()
            longest_s = max(longest_s, now_s - last_s)
            last_s = now_s
            if part.get("usage"):
                answer["tokens"] = part["usage"]["completion_tokens"]
    answer["longest_s"] = longest_s


def request(url: str, body: dict[str, object]) -> tuple[int, object, float]:
    """Return the status, the body and the seconds of an answer."""
    began_s = time.monotonic()
    try:
        with urllib.request.urlopen(post(url, body), timeout=300) as response:
            found = (response.status, json.load(response))
    except urllib.error.HTTPError as error:
        found = (error.code, json.load(error))
    return (*found, time.monotonic() - began_s)


def post(url: str, body: dict[str, object]) -> urllib.request.Request:
    """Return a request to the server's completions."""
    return urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )


def check_health(url: str, found: list[int], over: threading.Event) -> None:
    """Ask the server ten times a second whether it is healthy."""
    while not over.wait(0.1):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
                found.append(response.status)
        except OSError:
            found.append(0)


def limit_worker(pid: int) -> None:
    """Let the engine's worker allocate little more than it has now."""
    for child in psutil.Process(pid).children(recursive=True):
        if "VLLM::Worker" in " ".join([child.name(), *child.cmdline()]):
            has_bytes = data_bytes(child.pid)
            child.rlimit(psutil.RLIMIT_DATA, (has_bytes + SPARE_BYTES, psutil.RLIM_INFINITY))
            return
    raise RuntimeError("the server has no worker")


def data_bytes(pid: int) -> int:
    """Return the private memory of a process that counts against its limit."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    row = next(line for line in text.splitlines() if line.startswith("VmData"))
    return int(row.split()[1]) * 1024


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for the server's start."""
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server did not start")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
