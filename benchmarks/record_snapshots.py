"""Record what torch's allocator does on a GPU while jobs of many kinds run, for benchmarks/limit_memory.py --snapshots; 2 minutes.

Each job of support/recorded_jobs.py runs in a process of its own, recorded from before its first allocation; one of them also with
expandable segments, which, as the one of two streams and the offloaded cache, limit_memory does not replay. A snapshot keeps what a
replay needs: segments, blocks, and allocations, frees and segments in their order, without stacks.

    python benchmarks/record_snapshots.py FOLDER && tar -cJf snapshots.tar.xz FOLDER
"""

import argparse
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.figure import conclude, skip
from support.recorded_jobs import JOBS

MOST_EVENTS, MOST_BYTES, AT_ONCE, LIMIT_S = 400_000, 3 << 20, 6, 300
EXPANDABLE = "generate_batches_that_grow"
MOVES = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
SEGMENT = ("device", "address", "total_size", "stream", "segment_type", "segment_pool_id", "is_expandable")


def small(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return of a snapshot what moves memory, without what each event repeats."""
    segments = [
        {
            **{name: segment[name] for name in SEGMENT if name in segment},
            "blocks": [
                {name: block[name] for name in ("size", "requested_size", "state")} for block in segment["blocks"]
            ],
        }
        for segment in snapshot["segments"]
    ]
    traces = [
        [
            {name: event[name] for name in ("action", "addr", "size", "stream")}
            for event in trace
            if event["action"] in MOVES
        ]
        for trace in snapshot["device_traces"]
    ]
    return {"segments": segments, "device_traces": traces}


def record(name: str, path: Path) -> None:
    """Run one job here, and write its snapshot; nothing of CUDA may have been used before."""
    import torch

    torch.cuda.init()  # so that there is an allocator to record
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MOST_EVENTS)
    JOBS[name]("cuda")
    torch.cuda.synchronize()
    path.write_bytes(pickle.dumps(small(torch.cuda.memory._snapshot()), protocol=4))


def recorded(name: str, folder: Path, settings: str | None = None) -> str | None:
    """Record a job in a process of its own; return what went wrong, None where nothing did."""
    path = folder / f"{name}{'_expandable' if settings else ''}.pickle"
    given = {
        name: text for name, text in os.environ.items() if name not in {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    }
    if settings:  # the first is read since torch 2.10
        given |= {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    words = [sys.executable, __file__, str(path), "--job", name]
    ran = subprocess.run(words, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if ran.returncode:
        return f"{path.stem}: status {ran.returncode}: {ran.stderr.strip()[-400:]}"
    size = path.stat().st_size
    events = sum(map(len, pickle.loads(path.read_bytes())["device_traces"]))
    print(f"{path.name:50} {events:7} events, {size / 2**20:5.2f} MiB", flush=True)
    return f"{path.stem}: {size} bytes" if size > MOST_BYTES else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the snapshots go")
    parser.add_argument("--job", choices=JOBS, help="run this one here, and write it to FOLDER, which is its file")
    asked = parser.parse_args()
    if asked.job:
        record(asked.job, asked.folder)
        return
    import torch

    if not torch.cuda.is_available():
        skip("no CUDA device")
    asked.folder.mkdir(parents=True, exist_ok=True)
    runs: list[tuple[str, str | None]] = [(name, None) for name in JOBS]
    runs.append((EXPANDABLE, "expandable_segments:True"))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [text for text in pool.map(lambda run: recorded(run[0], asked.folder, run[1]), runs) if text]
    print(*wrong, sep="\n")
    conclude(f"{len(runs) - len(wrong)} of {len(runs)} jobs recorded, each below 3 MiB", met=not wrong)


if __name__ == "__main__":
    main()
