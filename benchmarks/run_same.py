"""Figure: whether `oomguard run` says of a failed command what `oomguard diagnose` says of the same
bytes, as JSON.

The command prints a labelled excerpt (needs ../shared beside the checkout) or a long log made here,
and fails. An excerpt whose last traceback is no failure of memory is counted apart: only `run`
knows that the command has ended of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.commands import oomguard_command
from support.figure import conclude, skip

CORPUS = Path(__file__).parents[2] / "shared" / "corpus"
SETS = ("dev.jsonl", "dev2.jsonl")
HEALTHY = (
    "INFO 11-22 06:40:43 [loggers.py:127] Engine 000: Avg prompt throughput: 12.1 tokens/s, "
    "running 3 reqs\n"
)
FAILURE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB. GPU 0 has a total "
    "capacity of 23.69 GiB of which "
    "{} MiB is free. Of the allocated memory 20.50 GiB is allocated by PyTorch, and 1.50 GiB is "
    "reserved by PyTorch but "
    "unallocated.\n"
)
# Below the cap of 256 MiB as fast as the command can print; beyond it at a pace.
LONG = {"200 MiB, 12 failures": (200, 12, None), "1 GiB at 50 MiB/s, 12 failures": (1024, 12, 50)}
PRINTER = """
import os, sys, time
path, rate = sys.argv[1], float(sys.argv[2])
began, done = time.monotonic(), 0
with open(path, "rb") as file:
    while block := file.read(1 << 18):
        left = memoryview(block)
        while left:
            left = left[os.write(1, left):]
        done += len(block)
        if rate:
            time.sleep(max(0.0, began + done / rate / 2**20 - time.monotonic()))
sys.exit(1)
"""


def told_by_run(path: Path, folder: Path, rate: float = 0) -> tuple[dict, bool]:
    """The report of a run whose command prints the file and fails, and whether it says that
    something else ended it.
    """
    report = folder / f"{path.stem}.report.json"
    command = [sys.executable, "-c", PRINTER, str(path), str(rate)]
    env = {**os.environ, "XDG_STATE_HOME": str(folder / f"state-{path.stem}")}
    ours = [*oomguard_command(), "run", "-v", "--dry-run", "--report", str(report), "--"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    told = subprocess.run([*ours, *command], **streams, check=False, env=env).stderr
    return json.loads(report.read_text()), b"the command ended of something else" in told


def told_by_diagnose(path: Path) -> dict:
    """What diagnose prints of the file."""
    command = [*oomguard_command(), "diagnose", "--format", "json", str(path)]
    return json.loads(subprocess.run(command, capture_output=True, check=False).stdout)


def compared(told: dict) -> dict:
    """What both say: all but the name of the source and what belongs to a run's attempts."""
    return {
        key: value for key, value in told.items() if key not in {"source", "attempts", "reduced"}
    }


def of_excerpt(job: tuple[Path, Path]) -> str:
    """How the two answers to an excerpt compare: the same, ended of something else, or
    different.
    """
    path, folder = job
    (run, ended_of_else), file = told_by_run(path, folder), told_by_diagnose(path)
    if compared(run) == compared(file):
        return "the same"
    if ended_of_else:
        return "ended of something else"
    print(f"{path.stem}: different", flush=True)
    return "different"


def long_log(path: Path, size_mib: int, failures: int) -> None:
    """Write a healthy log with failures at even distances, the last one near its end."""
    lines = (1 << 20) // len(HEALTHY)
    at = {(i + 1) * size_mib // failures - 1: i for i in range(failures)}
    with path.open("w") as file:
        for mib in range(size_mib):
            file.write(HEALTHY * lines)
            if mib in at:
                file.write(FAILURE.format(512 + at[mib], 100 + at[mib]) + HEALTHY * 50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--every", type=int, default=4, metavar="N", help="take each Nth excerpt (default 4)"
    )
    options = parser.parse_args()
    if not all((CORPUS / name).is_file() for name in SETS):
        skip("../shared/corpus is not beside the checkout")
    texts = [json.loads(line)["text"] for name in SETS for line in (CORPUS / name).open()][
        :: options.every
    ]
    counts = {"the same": 0, "ended of something else": 0, "different": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = [(folder / f"{i:05d}.log", folder) for i in range(len(texts))]
        for (path, _), text in zip(jobs, texts, strict=True):
            path.write_text(text)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for verdict in pool.map(of_excerpt, jobs):
                counts[verdict] += 1
        for title, (size_mib, failures, rate) in LONG.items():
            path = folder / f"{size_mib}.log"
            long_log(path, size_mib, failures)
            (run, _), file = told_by_run(path, folder, rate or 0), told_by_diagnose(path)
            if compared(run) == compared(file):
                verdict = "the same"
            else:
                verdict = "different"
            counts[verdict] += 1
            print(
                f"{title}: {len(run['incidents'])} and {len(file['incidents'])} incidents, "
                f"{verdict}",
                flush=True,
            )
    conclude(
        f"{counts['the same']} of {counts['the same'] + counts['different']} outputs: the same "
        "JSON from run and diagnose, "
        f"{counts['ended of something else']} more ended of something else (goal: all)",
        met=not counts["different"],
    )


if __name__ == "__main__":
    main()
