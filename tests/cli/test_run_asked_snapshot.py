"""``run --snapshot``: where the command fails and no snapshot came, one line says so and what to do instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OOM = "import sys; print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.', file=sys.stderr); sys.exit(7)"


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    journal = ["--journal", str(folder / "journal.db")]
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--snapshot",
        "s.pickle",
        *journal,
        "--",
        sys.executable,
        "-c",
        code,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_failing_program_without_vllm_learns_of_no_snapshot(tmp_path: Path):
    (tmp_path / "s-old.pickle").write_bytes(b"of another run")
    ran = run(tmp_path, OOM)
    assert ran.returncode == 7
    (line,) = (line for line in ran.stderr.splitlines() if "No memory snapshot was written" in line)
    assert "no allocation failed in a vLLM engine" in line
    assert f"oomguard.guard(snapshot='{tmp_path}/s.pickle')" in line


def test_nothing_is_told_of_a_command_that_succeeds_or_took_one(tmp_path: Path):
    took = run(tmp_path, f"open('s-1.pickle', 'wb').close(); {OOM}")
    assert "No memory snapshot" not in run(tmp_path, "pass").stderr + took.stderr
