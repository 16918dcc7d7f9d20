"""A program of one of the questions that users asked: it fails as told, is mended, and measures what the advice does.

All three take 7 to 11 minutes, as `make demo-seeds` does: CI runs them, a plain `make test` does not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.breadth
@pytest.mark.usefixtures("vllm_env")
@pytest.mark.parametrize("name", ["scoring", "vision", "speculative"])
def test_all_that_a_program_claims_of_its_seed_holds(name):
    command = [sys.executable, str(EXAMPLES / f"seed_{name}.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert ran.stdout.count("held: ") >= 4
