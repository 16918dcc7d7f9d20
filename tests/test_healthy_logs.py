"""Healthy and unrelated programs give no incident: one in eight in CI, one in 32 elsewhere; benchmarks/healthy_logs.py runs all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EVERY = 8 if os.environ.get("CI") else 32
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "healthy_logs.py"


@pytest.mark.breadth
@pytest.mark.timeout(900)
def test_what_healthy_programs_print_holds_no_incident(tmp_path):
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "--every", str(EVERY), "--minutes", "10"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )

    assert "incidents: 0 in 0 of" in ran.stdout, ran.stdout + ran.stderr
    files = int(re.search(r"^(\d+) files", ran.stdout, re.MULTILINE).group(1))
    assert files >= 800 // EVERY, ran.stdout
