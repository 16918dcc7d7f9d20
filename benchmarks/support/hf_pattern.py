"""One pattern of data/hf_patterns, judged by its tester's own code in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from support.commands import ROOT

DATA: Final = ROOT / "benchmarks" / "data" / "hf_patterns"
# What the patterns import; the rest of requirements.txt comes with these.
LIBRARIES: Final = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "lm_eval",
    "pandas",
    "peft",
    "PIL",
    "sentence_transformers",
)
TIMEOUT_S: Final = 800  # five runs of at most 150 s each


def observe(name: str) -> dict[str, Any]:
    """Return the tester's record of a pattern; one that ends the process or does not end is an
    other error.
    """
    with tempfile.TemporaryDirectory(prefix="oomguard-hf-") as folder:
        results = Path(folder, "results.json")
        shutil.copy(DATA / "bare.json", results.with_suffix(".bare.json"))
        command = [sys.executable, str(DATA / "run.py"), "--only", name, "--results", str(results)]
        # Patterns leave what they save in temporary folders of their own: all of it goes with this
        # one.
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            ran = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"outcome": "other error", "error": f"not done after {TIMEOUT_S} s"}
        if not results.is_file():
            return {
                "outcome": "other error",
                "error": f"status {ran.returncode}: {ran.stderr[-400:]}",
            }
        record = dict(json.loads(results.read_text(encoding="utf-8"))[name])
        return {key: value for key, value in record.items() if key in KEPT}


KEPT: Final = (
    "outcome",
    "why",
    "error",
    "notes",
    "differences",
    "patches",
    "limit",
    "peak",
    "guarded_peak",
    "seconds_guarded",
    "as_expected",
)
