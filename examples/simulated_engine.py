"""Simulate ``vllm serve`` on simulated GPUs: find the devices, use a share, print vLLM's messages.

simulated_gpus.py puts it on PATH as ``vllm``. Three environment variables control it:

- SIMULATED_START_S, SIMULATED_RUN_S: seconds for loading and for serving (default 0.2).
- SIMULATED_NEIGHBOUR: bytes that another process takes during the first start.
"""

import argparse
import fcntl
import os
import sys
import time
from importlib import metadata
from pathlib import Path

import simulated_gpus

parser = argparse.ArgumentParser()
parser.add_argument("serve")
parser.add_argument("model")
parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
args, _ = parser.parse_known_args()
folder = Path(os.environ[simulated_gpus.VARIABLE])
CORE = "(EngineCore pid=2) "


def note(what: str, uuids: list[str]) -> None:
    """Record an event and its devices, so that a test can check that no two starts overlap."""
    with open(folder / "happened", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{time.monotonic():.4f} {os.getpid()} {what} {','.join(uuids)}\n")


def devices() -> list[tuple[str, int]]:
    """Return the visible devices with their sizes, as this version of the engine finds them."""
    there = [line.split() for line in (folder / "devices").read_text().splitlines()]
    sizes = {words[1]: int(words[2]) for words in there if words[0] in ("gpu", "mig")}
    by_index = [words[1] for words in there if words[0] == "gpu"]
    reads_uuids = tuple(map(int, metadata.version("vllm").split(".")[:2])) >= (0, 24)
    found = []
    for entry in os.environ.get(
        "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(by_index))))
    ).split(","):
        if reads_uuids and not entry.isdigit():
            uuid = entry
        else:
            uuid = by_index[int(entry)]
        found.append((uuid, sizes[uuid]))
    return found


def held(uuid: str) -> int:
    """Return the bytes that living processes use on a device."""
    total = 0
    for path in folder.glob("use.*"):
        if Path("/proc", path.suffix[1:]).exists():
            total += sum(
                int(size)
                for name, size in map(str.split, path.read_text().splitlines())
                if name == uuid
            )
    return total


def fail(message: str) -> None:
    for text in ("EngineCore failed to start.", "Traceback (most recent call last):", message):
        print(f"{CORE}ERROR 11-22 04:21:38 [core.py:1510] {text}", flush=True)
    sys.exit(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
        "proc(s): {}"
    )


version = metadata.version("vllm")
share = args.gpu_memory_utilization
ranks = args.tensor_parallel_size
given = {"model": args.model, "gpu_memory_utilization": share}
print(
    f"(APIServer pid=1) INFO 11-22 04:20:27 [api_utils.py:286] non-default args: {given}\n"
    f"{CORE}INFO 11-22 04:20:47 [core.py:133] Initializing a V1 LLM engine (v{version}) with "
    f"config: model='{args.model}',"
    f" dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size={ranks}, quantization=None",
    flush=True,
)
mine = devices()[:ranks]
names = [uuid for uuid, _ in mine]
note("starts", names)
if (size := int(os.environ.get("SIMULATED_NEIGHBOUR", "0"))) and not (folder / "use.1").exists():
    simulated_gpus.take(folder, 1, {names[0]: size})  # process 1 lives as long as the machine
for uuid, total in mine:
    free = total - held(uuid)
    wanted = share * total
    if free < wanted:
        note("fails", names)
        fail(
            f"ValueError: Free memory on device cuda:0 ({free / 2**30:.2f}/{total / 2**30:.2f} "
            "GiB) on startup is less than"
            f" desired GPU memory utilization ({share}, {wanted / 2**30:.2f} GiB). Decrease GPU "
            "memory utilization or reduce"
            " GPU memory used by other processes."
        )
time.sleep(float(os.environ.get("SIMULATED_START_S", "0.2")))
simulated_gpus.take(folder, os.getpid(), {uuid: int(share * total) for uuid, total in mine})
note("started", names)
print(
    f"{CORE}INFO 11-22 04:21:40 [core.py:386] init engine (profile, create kv cache, warmup "
    "model) took 3.25 s",
    flush=True,
)
time.sleep(float(os.environ.get("SIMULATED_RUN_S", "0.2")))
note("ends", names)
