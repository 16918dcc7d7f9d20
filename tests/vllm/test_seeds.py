"""A program of one of the questions that users asked: it fails as told, is mended, and measures what the advice does.

All three take 7 to 11 minutes, as `make demo-seeds` does: CI runs them, a plain `make test` does not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES, PAGE = ROOT / "examples", ROOT / "docs" / "seeds.md"


@pytest.mark.breadth
@pytest.mark.usefixtures("vllm_env")
@pytest.mark.parametrize("name", ["scoring", "vision", "speculative"])
def test_all_that_a_program_claims_of_its_seed_holds(name):
    command = [sys.executable, str(EXAMPLES / f"seed_{name}.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert ran.stdout.count("held: ") >= 4
    shown = skeletons(ran.stdout)
    assert skeletons(tables_of(name)) <= shown, sorted(skeletons(tables_of(name)) - shown)


def tables_of(name: str) -> str:
    """Return the tables that the page shows of a program."""
    section = next(part for part in PAGE.read_text().split("\n## ") if f"seed_{name}.py" in part)
    return re.findall(r"```text\n(.*?)```", section, re.DOTALL)[0]


def skeletons(text: str) -> set[str]:
    """Return the lines without what differs from machine to machine: figures with their units, and the spaces that they move."""
    lines = (re.sub(r"\s+", " ", re.sub(r"-?\d[\d.]*( [KMG]iB)?", "#", line)).strip() for line in text.splitlines())
    return {line for line in lines if line.strip("- ")}
