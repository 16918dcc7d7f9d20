"""The pages' own Python passes mypy --strict, as far as its functions have types."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r'^```python title="(?P<name>\w+\.py)"\n(?P<text>.*?)^```$', re.M | re.S)
UNTYPED = re.compile(r"^\s*(?:async )?def \w+\([^)]*\):", re.M)
# A page's program that shows something that type checkers refuse, or that uses another block.
LEFT_OUT = {"hostile.py", "model.py", "job.py", "test_job.py"}


def test_the_programs_of_the_pages_have_types(tmp_path):
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            is_checked = block["name"] not in LEFT_OUT and not UNTYPED.search(block["text"])
            if is_checked and "from model import" not in block["text"]:
                (tmp_path / f"{page.stem.replace('-', '_')}_{block['name']}").write_text(
                    block["text"]
                )
    files = sorted(str(path) for path in tmp_path.iterdir())
    assert len(files) >= 5

    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports"]
    options = ["--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}"]
    run = subprocess.run(
        [*command, *options, *files], check=False, capture_output=True, text=True, cwd=ROOT
    )

    assert run.returncode == 0, run.stdout
