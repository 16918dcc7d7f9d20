"""The job of papers in examples/ ends well: all that it claims held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
EXAMPLE = Path(__file__).parents[2] / "examples" / "seed_papers.py"


@pytest.mark.breadth
def test_every_claim_of_the_papers_job_holds_and_its_trace_is_written(tmp_path):
    trace = tmp_path / "papers.trace.json"
    env = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}
    ran = subprocess.run(
        [sys.executable, EXAMPLE, trace], env=env, capture_output=True, text=True, timeout=300, check=False
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "DID NOT HOLD" not in ran.stdout
    assert "batch_size 6 failed" in trace.read_text()
