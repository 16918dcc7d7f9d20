"""A script with two engines of one model: the change reaches the one that failed, and the other keeps what it needs."""

from __future__ import annotations

import subprocess

import pytest


@pytest.mark.breadth
def test_only_the_engine_that_failed_is_changed(folder, vllm_env, tmp_path):
    command = [
        "oomguard",
        "run",
        "--journal",
        str(tmp_path / "j"),
        "--allow",
        "reduces-capacity",
        "--",
        "python",
        "two_engines.py",
    ]
    ran = subprocess.run(command, cwd=folder, env=vllm_env, capture_output=True, text=True, timeout=590, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "RESULT [5000, 1792] 4" in ran.stdout
    assert ran.stderr.count("attempt ended") == 2
