"""Figure: the real vLLM on the CPU in a small control group, with a KV cache or weights that are too
large for it, under `oomguard run`: it must be run again with a value that fits and answer, and the
kernel may kill nothing.

Rounds differ by limit, weights, data type, and by how the cache's size is given. A process in the
same group has to survive. Skipped if no control group may be made. ``--resume FILE`` goes on where
a run stopped, ``--most N`` ends after N new rounds.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from support.figure import conclude, skip
from support.host_limits import kernel_kills, limited_group, most_bytes, wrapped
from support.resume import Results

ROOT = Path(__file__).parents[1]
ROUNDS = 10
LIMITS_MIB = (5120, 6144)
# Layers of 2,048: each has about 50 million parameters.
LAYERS = (1, 4, 8)
CACHES = (
    (),
    ("--gpu-memory-utilization", "0.6"),
    ("--kv-cache-memory-bytes", str(6 << 30)),
    ("--gpu-memory-utilization", "0.4"),
    ("--kv-cache-memory-bytes", str(4 << 30)),
)
DTYPES = ("float16", "float32")
READY_S = 900  # of an overloaded machine


def model_folder(tiny: Path, folder: Path, layers: int) -> Path:
    """Copy the tiny model with a larger configuration; vLLM fills its weights itself."""
    place = folder / f"layers-{layers}"
    place.mkdir()
    for path in tiny.iterdir():
        if path.suffix == ".json":
            (place / path.name).write_text(path.read_text())
    config = json.loads((place / "config.json").read_text())
    config.update(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
    )
    (place / "config.json").write_text(json.dumps(config))
    return place


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def answers(port: int, process: subprocess.Popen) -> bool:
    """Wait for the server; return whether it answers a request."""
    deadline = time.monotonic() + READY_S
    body = json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        body.encode(),
        {"Content-Type": "application/json"},
    )
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status == 200
        except OSError:
            time.sleep(1)
    return False


def one_round(
    number: int, group: Path, limit_mib: int, environment: Path, place: Path, folder: Path
) -> dict[str, object]:
    """Run one round; return what was seen."""
    port = free_port()
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    cache = CACHES[number % len(CACHES)]
    dtype = DTYPES[number % len(DTYPES)]
    command = [
        *(str(environment / "bin" / "python"), "-m", "oomguard", "run"),
        *("--allow", "reduces-capacity", "--report", str(report), "--"),
        *(str(environment / "bin" / "vllm"), "serve", str(place), "--served-model-name", "m"),
        *("--port", str(port), "--load-format", "dummy", "--dtype", dtype, "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"),
        *cache,
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    env["PATH"] = f"{environment / 'bin'}{os.pathsep}{env['PATH']}"
    env["XDG_STATE_HOME"] = str(folder / "state")
    beside = subprocess.Popen(wrapped(group, ["sleep", "3600"]))
    began_s = time.monotonic()
    log = folder / f"{number}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            wrapped(group, command), stdout=output, stderr=output, env=env, cwd=folder
        )
        try:
            is_answered = answers(port, process)
            survived = beside.poll() is None
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            beside.kill()
            beside.wait()
    text = log.read_text(errors="replace")
    changes = [line for line in text.splitlines() if "utilization" in line and "->" in line]
    return {
        "limit_mib": limit_mib,
        "layers": place.name,
        "dtype": dtype,
        "cache": " ".join(cache) or "default",
        "answered": is_answered,
        "stops": text.count("Stopping the command before host memory runs out"),
        "kernel_kills": kernel_kills(group),
        "left_mib": limit_mib - (most_bytes(group) >> 20),
        "survived": survived,
        "changes": changes[:2],
        "seconds": round(time.monotonic() - began_s),
        "tail": text.splitlines()[-12:] if not is_answered else [],
    }


def is_right(seen: dict[str, object]) -> bool:
    """Return whether the engine was stopped in time, ran again, and answered."""
    is_kept = seen["kernel_kills"] == 0 and seen["left_mib"] > 0 and seen["survived"]
    return bool(seen["answered"] and seen["stops"] and is_kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--most", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    if not (arguments.environment / "ready").exists():
        skip("no vLLM environment: run scripts/vllm-env")
    results = Results(arguments.resume)
    right = 0
    new = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = str(arguments.environment / "bin" / "python")
        maker = str(ROOT / "examples" / "make_tiny_model.py")
        subprocess.run([python, maker, str(folder / "tiny")], check=True, capture_output=True)
        places = {layers: model_folder(folder / "tiny", folder, layers) for layers in LAYERS}
        for number in range(ROUNDS):
            seen = results.get(str(number))
            if seen is None:
                if new == arguments.most:
                    print(f"{right} of {number} so far")
                    return
                new += 1
                limit_mib = LIMITS_MIB[number % len(LIMITS_MIB)]
                place = places[LAYERS[number % len(LAYERS)]]
                with limited_group(limit_mib) as group:
                    if group is None:
                        skip("this user may not make a control group")
                    seen = one_round(number, group, limit_mib, arguments.environment, place, folder)
                results.add(str(number), seen)
                print(number, seen, flush=True)
            right += is_right(seen)
    conclude(
        f"{right} of {ROUNDS} engines in a small control group were stopped in time, run again "
        "with a cache that fits, and answered (goal: all)",
        met=right == ROUNDS,
    )


if __name__ == "__main__":
    main()
