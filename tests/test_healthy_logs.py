"""Healthy and unrelated programs give no incident: one in eight; benchmarks/healthy_logs.py runs all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "healthy_logs.py"


@pytest.mark.timeout(900)
def test_what_healthy_programs_print_holds_no_incident(tmp_path):
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "--every", "8", "--minutes", "10"],
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )

    files = int(re.search(r"^(\d+) files", ran.stdout, re.MULTILINE).group(1))
    assert files >= 100, ran.stdout
    assert "incidents: 0 in 0 of" in ran.stdout, ran.stdout
