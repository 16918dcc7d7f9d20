"""Seed 003: servers and the extraction of activations shard over the same GPUs, by two lists that a
person keeps apart by hand.

    python examples/seed_placement.py

Four simulated GPUs of 24 GiB: NVML tells of them, and ``vllm`` and the extraction take their memory
there (simulated_gpus.py). The guide's lists for four GPUs name each device twice;
``oomguard.place`` refuses that, gives each system devices of its own, and runs them in turn where
both are to have all four.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from seed_run import JOBS, conclude, table
from simulated_gpus import Gpus, build

FOUR = [0, 1, 2, 3]
OOM = "CUDA out of memory"
# Llama 3.1 8B, in place of the guide's own model.
MODEL = json.loads((Path(__file__).parent / "models" / "llama-3.1-8b.json").read_text())
EXTRACT = [sys.executable, str(JOBS / "extract_activations.py")]
PLACE = """
import json, sys, oomguard
try:
    print(json.dumps({name: found.env for name, found in oomguard.place(json.load(sys.stdin)).items()}))
except oomguard.PlacementError as error:
    print(json.dumps(f"{error}"))
"""


def start(gpus: Gpus, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a command on the simulated GPUs."""
    return subprocess.Popen(
        command,
        env={**os.environ, **gpus.env, "SIMULATED_RUN_S": "3", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(jobs: Sequence[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Wait for jobs; return their statuses and all that they printed."""
    printed = [job.communicate(timeout=300)[0] for job in jobs]
    return [job.returncode for job in jobs], "\n".join(printed)


def place(gpus: Gpus, wanted: Mapping[str, int | list[int]]) -> dict[str, dict[str, str]] | str:
    """Ask oomguard.place on the simulated GPUs; return its variables, or what it says is wrong."""
    ran = subprocess.run(
        [sys.executable, "-c", PLACE],
        input=json.dumps(wanted),
        env={**os.environ, **gpus.env},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, str]] | str = json.loads(ran.stdout)
    return found


def both(
    gpus: Gpus, serve: Sequence[str], servers: Mapping[str, str], extraction: Mapping[str, str]
) -> tuple[int, int, str]:
    """Start a server on each device of one list and the extraction on the other; return how many of
    each ran, and what was printed.
    """
    devices = servers["CUDA_VISIBLE_DEVICES"].split(",")
    jobs = [
        start(gpus, serve, {**servers, "CUDA_VISIBLE_DEVICES": one, "SIMULATED_RUN_S": "600"})
        for one in devices
    ]
    while all(job.poll() is None for job in jobs) and gpus.happened_to("started") < len(jobs):
        time.sleep(0.05)  # the guide's sweep begins once the servers stand
    statuses, printed = ended([start(gpus, EXTRACT, extraction)])
    standing = sum(job.poll() is None for job in jobs)
    for job in jobs:
        job.terminate()
        job.communicate()
    (gpus.folder / "happened").unlink()
    return standing, statuses.count(0), printed


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="seed-placement-") as name:
        gpus = Gpus(Path(name), build(Path(name)))
        gpus.are_alike(4)
        gpus.engine()
        (gpus.folder / "config.json").write_text(json.dumps(MODEL))
        serve = ["vllm", "serve", str(gpus.folder), "--max-model-len", "8192"]

        shared = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        by_hand = both(gpus, serve, shared, shared)
        refused = place(gpus, {"VLLM_GPUS": FOUR, "ACTIVATION_GPUS": FOUR})
        too_many = place(gpus, {"serve": 4, "extract": 4})
        apart = place(gpus, {"serve": 3, "extract": 1})
        assert isinstance(apart, dict)
        placed = both(gpus, serve, apart["serve"], apart["extract"])

        turn = ["oomguard", "run", "--gpus", "4", "--wait", "5m", "--lease", "job", "--"]
        print(
            "$",
            " ".join(turn),
            "vllm serve … -tp 4    and at the same moment",
            " ".join(turn),
            "python extract_activations.py",
        )
        turns, printed = ended(
            [start(gpus, [*turn, *command], {}) for command in ([*serve, "-tp", "4"], EXTRACT)]
        )
    table(
        "Four servers and the extraction of activations on four GPUs of 24 GiB",
        [
            ["", "servers on", "extraction on", "servers that ran", "extraction"],
            [
                "the guide's lists for four GPUs",
                "0,1,2,3",
                "0,1,2,3",
                f"{by_hand[0]} of 4",
                "ran" if by_hand[1] else "out of memory",
            ],
            [
                'oomguard.place({"serve": 3, "extract": 1})',
                apart["serve"]["CUDA_VISIBLE_DEVICES"],
                apart["extract"]["CUDA_VISIBLE_DEVICES"],
                f"{placed[0]} of 3",
                "ran" if placed[1] else "out of memory",
            ],
            [
                "each with --gpus 4 --wait",
                "0,1,2,3",
                "0,1,2,3, in turn",
                "1 over 4" if turns[0] == 0 else "0",
                "ran" if turns[1] == 0 else "failed",
            ],
        ],
    )
    table(
        "The seed's account, and what was found",
        [
            ["what it says", "what was found"],
            [
                "two lists in config.py keep the systems apart",
                "nothing checks them; for four GPUs they name each device twice",
            ],
            [
                "sharing needs pkill -f vllm between the two",
                "each waits for the other's end, and nobody's process is killed",
            ],
            ["the same lists, asked of oomguard.place", str(refused)],
            ["eight devices wanted of four", str(too_many)],
        ],
    )
    conclude(
        {
            "by the guide's lists for four GPUs the extraction runs out of memory": by_hand[:2]
            == (4, 0)
            and OOM in by_hand[2],
            "the two lists are refused, and the device that both name is told": isinstance(
                refused, str
            )
            and "device 0" in refused,
            "too many are refused with both numbers": isinstance(too_many, str)
            and too_many.startswith("4 too few"),
            "on devices of their own both run": placed[:2] == (3, 1),
            "over the same four devices they run in turn": turns == [0, 0]
            and "waiting for a device" in printed,
        }
    )


if __name__ == "__main__":
    main()
