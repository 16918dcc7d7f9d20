"""Simulate a job that extracts activations: it uses 9 GiB on each visible GPU for a while.

If a GPU has less free memory, the job ends with PyTorch's error message. SIMULATED_RUN_S sets how
long it runs. examples/seed_placement.py starts it.
"""

import os
import sys
import time
from pathlib import Path

GIB = 2**30
NEEDED = 9 * GIB

folder = Path(os.environ["SIMULATED_GPUS"])
there = [line.split() for line in (folder / "devices").read_text().splitlines()]
visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(there)))))
mine = [(there[int(entry)][1], int(there[int(entry)][2])) for entry in visible.split(",")]
for number, (uuid, total) in enumerate(mine):
    used = 0
    for path in folder.glob("use.*"):
        if Path("/proc", path.suffix[1:]).exists():
            used += sum(
                int(size)
                for name, size in map(str.split, path.read_text().splitlines())
                if name == uuid
            )
    if total - used < NEEDED:
        sys.exit(
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU {number} "
            "has a total capacity of"
            f" {total / GIB:.2f} GiB of which {(total - used) / GIB:.2f} GiB is free. Including "
            "non-PyTorch memory, this process has"
            " 0.00 GiB memory in use. Of the allocated memory 0 bytes is allocated by PyTorch, and "
            "0 bytes is reserved by PyTorch but"
            " unallocated."
        )
new = folder / f"new.{os.getpid()}"
new.write_text("".join(f"{uuid} {NEEDED}\n" for uuid, _ in mine))
new.replace(folder / f"use.{os.getpid()}")
time.sleep(float(os.environ.get("SIMULATED_RUN_S", "1")))
print(f"RESULT activations on {visible}")
