"""`oomguard run` over a script that really runs out of a GPU's memory (`make test-gpu`): fragmented once, relaunched once, done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from support.commands import ROOT
from support.supervising import LIMIT_S, RUN

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Segments that are all free, then a block in each that leaves a rest: no rest holds the last block, all of them together would.
FRAGMENTS = """
import sys, torch
free, total = torch.cuda.mem_get_info()
share = float(sys.argv[1])
if share < 1:
    torch.cuda.set_per_process_memory_fraction(share)
    free = min(free, int(share * total))
piece = int(0.025 * free) >> 21 << 21
def empty(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
held = [empty(piece) for _ in range(36)]
del held
held = [empty(int(0.6 * piece)) for _ in range(36)]
last = empty(6 * piece)
print("DONE", torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
"""
FILLS = """
import sys, torch
if float(sys.argv[1]) < 1:
    torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]))
held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(3)]
spare = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
spare = spare[:1].clone()
torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
"""


def environment():
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PYTORCH_", "OOMGUARD_"))
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")])),
    }


def ran(words, folder):
    return subprocess.run(
        words,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("share", ["1", "0.25"], ids=["the whole device", "a quarter of it"])
def test_fragmented_device_recovers_with_expandable_segments(tmp_path, told, share):
    (tmp_path / "job.py").write_text(FRAGMENTS)
    done = ran([*RUN, "--", sys.executable, "job.py", share], tmp_path)

    told(f"fragmented, share {share}", re.findall(r"CUDA out of memory\. Tried.*", done.stderr)[:1])
    told("under run", done.stdout.strip(), "DONE")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DONE")
    assert "(fragmentation" in done.stderr
    assert (
        done.stderr.count("Running the command again: allocator_options=expandable_segments:True")
        == 1
    )
    assert done.stderr.count("Attempt started: number=") == 1


@pytest.mark.parametrize("share", ["1", "0.25"], ids=["the whole device", "a quarter of it"])
def test_every_printed_number_of_a_real_failure_is_read(tmp_path, told, share):
    (tmp_path / "job.py").write_text(FILLS)
    bare = ran([sys.executable, "job.py", share], tmp_path)
    (tmp_path / "error.log").write_text(bare.stderr)
    read = ran(
        [sys.executable, "-m", "oomguard", "diagnose", "--format", "json", "error.log"], tmp_path
    )
    (message,) = re.findall(r"CUDA out of memory.*", bare.stderr)[:1]
    (incident,) = json.loads(read.stdout)["incidents"]

    told(f"torch {torch.__version__} says, share {share}", message)
    told("read", incident["facts"])
    assert incident["kind"] == "cuda_oom"
    printed = {
        "tried_bytes": r"Tried to allocate {}",
        "device_total_bytes": r"total capacity of {}",
        "device_free_bytes": r"of which {} is free",
        "process_in_use_bytes": r"this process has {} memory in use",
        "allocated_bytes": r"Of the allocated memory {} is allocated by PyTorch",
        "reserved_unallocated_bytes": r"and {} is reserved by PyTorch but unallocated",
        **({"allowed_bytes": r"{} allowed;"} if float(share) < 1 else {}),
    }
    for fact, words in printed.items():
        number, unit = re.search(words.format(r"([\d.]+) (\w+)"), message).groups()
        assert incident["facts"][fact] == pytest.approx(float(number) * UNITS[unit], abs=1), fact
    assert incident["facts"]["gpu_index"] == 0
