"""``diagnose --on ray`` on a local cluster: done once, in a process of its own (``cluster_work.py``), and told here piece by piece."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "examples" / "logs"
WORK = Path(__file__).with_name("cluster_work.py")


def make_logs(folder: Path) -> None:
    """Make a few logs with failures, without, half written, empty; and in the working directory what must not be imported."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    for i in range(8):
        shutil.copyfile(sorted(LOGS.glob("*.log"))[i % 4], logs / f"slurm-7_{i:02}.out")
    (logs / "a.log").write_text("INFO: all is well\n")
    (logs / "empty.log").write_text("")
    (logs / "cut.gz").write_bytes(
        gzip.compress((LOGS / "vllm_serve_kv_cache.log").read_bytes())[:-500]
    )
    (folder / "regex.py").write_text("raise SystemExit('imported from the working directory')\n")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, folder_of_run: Path) -> dict[str, Any]:
    """What was done, as JSON; of several pytest workers one does it."""
    pytest.importorskip("ray")
    kept = folder_of_run / "on-cluster.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            folder = tmp_path_factory.mktemp("fleet")
            make_logs(folder)
            variables = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONSAFEPATH": "1"}
            variables.pop("RAY_ADDRESS", None)
            ran = subprocess.run(
                [sys.executable, str(WORK), str(folder)],
                capture_output=True,
                text=True,
                env=variables,
                timeout=500,
                check=False,
            )
            assert ran.returncode == 0, ran.stderr[-3000:]
            kept.write_text(ran.stdout.splitlines()[-1])
    return dict(json.loads(kept.read_text()))


def test_cluster_prints_the_same_json_with_the_same_status(told: dict[str, Any]):
    here, there = told["all"]["here"], told["all"]["there"]
    assert there["out"] == here["out"]
    assert there["status"] == here["status"]
    assert len(here["out"]) > 500


def test_cluster_of_another_version_is_an_error_with_both(told: dict[str, Any]):
    found = told["another version"]
    assert found["status"] == 2
    assert "the Ray cluster runs Ray 2.9.3" in found["err"]
    assert "pip install 'ray==2.9.3'" in found["err"]
    assert "Traceback" not in found["err"]


def test_a_cluster_that_does_not_answer_is_an_error(told: dict[str, Any]):
    found = told["nobody answers"]
    assert found["status"] == 2
    assert "oomguard cannot join the Ray cluster" in found["err"]
    assert "Traceback" not in found["err"]
