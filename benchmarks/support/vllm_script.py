"""A script of tests/vllm/scripts, run to its end: what it printed last is its result."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def result_of(folder: Path, env: Mapping[str, str], script: str, *words: str, **more: str) -> Any:
    """Run a script with words and variables, and return the JSON behind its last RESULT."""
    ran = subprocess.run(
        ["python", script, *words],
        cwd=folder,
        env={**env, **more},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    rows = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert rows, ran.stdout[-4000:] + ran.stderr[-4000:]
    return json.loads(rows[-1].removeprefix("RESULT "))
