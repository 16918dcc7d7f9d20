"""Healthy and unrelated programs give no incident: one in EVERY here; benchmarks/healthy_logs.py runs all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EVERY = 64
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "healthy_logs.py"


def test_what_healthy_programs_print_holds_no_incident(tmp_path):
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "--every", str(EVERY), "--minutes", "5"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )

    assert "incidents: 0 in 0 of" in ran.stdout, ran.stdout + ran.stderr
    files = int(re.search(r"^(\d+) files", ran.stdout, re.MULTILINE).group(1))
    assert files >= 800 // EVERY, ran.stdout
