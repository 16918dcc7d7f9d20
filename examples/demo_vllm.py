"""Rescue a real vLLM server on the CPU: diagnose its failed start, relaunch it, send a request."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).parents[1]


def main() -> None:
    env = {
        **os.environ,
        "PATH": f"{ROOT / '.venv-vllm' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["python", ROOT / "examples" / "make_tiny_model.py", "tiny"],
            cwd=folder,
            env=env,
            check=True,
            capture_output=True,
        )
        serve = (
            "vllm serve ./tiny --max-model-len 32768 --kv-cache-memory-bytes 1000000 "
            f"--enforce-eager --port {port}"
        )
        command = ["oomguard", "run", "--allow", "reduces-capacity", "--", *serve.split()]
        print("$", " ".join(command), "> server.log   (about a minute)", flush=True)
        with (
            open(f"{folder}/server.log", "wb") as log,
            open(f"{folder}/errors.log", "wb") as errors,
        ):
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=errors)
            try:
                body = {
                    "model": "./tiny",
                    "prompt": "the quick brown",
                    "max_tokens": 8,
                    "ignore_eos": True,
                }
                answer = ask(f"http://127.0.0.1:{port}/v1/completions", body, process)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=90)
        print(ours(pathlib.Path(folder, "errors.log").read_text()))
    print("\nPOST /v1/completions ->", json.dumps(answer["usage"]))


def ours(errors: str) -> str:
    """Return only the lines that oomguard printed."""
    kept = []
    tail = False
    for line in errors.splitlines():
        tail = tail or line.startswith("What oomguard did")
        if tail or line.startswith(("oomguard:", "╭", "│", "╰", "# ", "vllm serve")):
            kept.append(line)
    return "\n".join(kept)


def ask(url: str, body: dict[str, object], process: subprocess.Popen[bytes]) -> dict[str, object]:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            request = urllib.request.Request(
                url, json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except OSError:
            time.sleep(1)
    raise SystemExit("the server did not answer")


if __name__ == "__main__":
    main()
