"""Healthy services of the real vLLM for the CPU: a tiny model, several settings and log levels,
requests, a clean end.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

START_S = 240
REQUESTS = 12
# The default share is more than what is free of a node where something else runs.
SMALL_SHARE = ["--gpu-memory-utilization", "0.3"]
PROMPTS = (
    "What does 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB' mean?",
    (
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine."
    ),
    "Write a poem about a room with a broom.",
)
LAUNCHES: tuple[tuple[str, list[str], dict[str, str]], ...] = (
    ("info", ["--max-model-len", "1024"], {}),
    (
        "debug_requests",
        [
            "--max-model-len",
            "2048",
            "--enable-log-requests",
            "--enable-log-outputs",
            "--max-num-seqs",
            "2",
        ],
        {"VLLM_LOGGING_LEVEL": "DEBUG"},
    ),
    (
        "small_pool",
        ["--max-model-len", "512", "--kv-cache-memory-bytes", "4000000", "--enable-log-requests"],
        {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_COLOR": "1"},
    ),
)


def launch(path: Path, root: Path, options: list[str], extra: dict[str, str]) -> None:
    """Serve, answer requests, end on SIGINT; what it printed is in ``path``."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OOMGUARD_", "VLLM_"))
    }
    binaries = root / ".venv-vllm" / "bin"
    if not (binaries / "vllm").is_file():
        raise SystemExit("no vLLM environment: run scripts/vllm-env")
    environment |= {
        "PATH": f"{binaries}{os.pathsep}{environment['PATH']}",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, path.with_suffix(".new").open("wb") as out:
        subprocess.run(
            ["python", str(root / "examples" / "make_tiny_model.py"), "tiny"],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
        )
        command = [
            "vllm",
            "serve",
            "./tiny",
            "--enforce-eager",
            *SMALL_SHARE,
            "--port",
            str(port),
            *options,
        ]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, port)
            for i in range(REQUESTS):
                _post(
                    port,
                    {"model": "./tiny", "prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": 16 + i},
                )
            time.sleep(11)  # the statistics are logged every ten seconds
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    path.with_suffix(".new").replace(path)


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(
        "vLLM did not start: " + ("it ended" if process.poll() is not None else "too slow")
    )


def _post(port: int, body: dict[str, object]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
