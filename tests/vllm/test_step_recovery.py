"""The real engine, whose steps run out of memory: it goes on, and only a request that cannot fit fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomguard.journal.store import Journal
from support.vllm_script import result_of

ROOT = Path(__file__).parents[2]
ENGINE = str(ROOT / "benchmarks" / "support" / "step_engine.py")
# Each covers what the others leave out; benchmarks/step_recovery.py has all of the matrix.
MODES = (
    {"async": 1, "structured": 1},
    {"lora": 1, "arguments": {"enable_prefix_caching": False}},
    {"runner": 2, "tokens": 6, "lengths": [20, 60], "rate": 0.05},
)


@pytest.mark.parametrize("mode", MODES, ids=("asynchronous", "lora", "second-runner"))
def test_the_others_finish_with_the_same_tokens(folder, vllm_env, mode):
    asked = {"failures": 6, "requests": 10, **mode}
    found: dict[str, Any] = result_of(folder, vllm_env, ENGINE, json.dumps(asked))
    assert found["recoveries"] >= 5
    assert found["finished"] == found["equal"] == found["requests"]
    assert found["with_numbers"] == found["refused"] == found["offenders"] > 0
    assert found["blocks_lost"] == 0


@pytest.mark.parametrize("is_async", [0, 1])
def test_aborts_pauses_broken_recoveries_and_engines_without_room(folder, vllm_env, is_async):
    asked = {"way": "edges", "async": is_async}
    found: dict[str, Any] = result_of(folder, vllm_env, ENGINE, json.dumps(asked))
    assert found["after_abort"] == found["finished"] == 5
    assert found["idle"] == 0
    assert found["after_pause"] == 6
    assert found["without_requests"] == (6 if is_async else None)
    assert found["broken"] == "OutOfMemoryError"
    assert found["at_one_token"]["ended"] == "OutOfMemoryError"
    assert found["at_one_token"]["seconds"] < 30


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [({"failures": 1, "requests": 8, "rate": 1.0}, "0"), ({"start_rate": 1.0}, "1")],
    ids=("without-oomguard", "start-up"),
)
def test_failures_without_oomguard_or_during_start_up_end_the_engine(
    folder, vllm_env, mode, wanted
):
    ran = subprocess.run(
        ["python", ENGINE, json.dumps(mode)],
        cwd=folder,
        env={**vllm_env, "OOMGUARD_VLLM_STEP_RECOVERY": wanted},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1
    assert "OutOfMemoryError" in ran.stderr
    assert "the engine goes on" not in ran.stdout + ran.stderr


def test_the_next_attempt_has_the_step_limit_that_worked(folder, vllm_env, tmp_path):
    """Large steps fail and smaller ones work; then nothing works, and the engine ends."""
    (tmp_path / "tiny").symlink_to(folder / "tiny")
    journal = tmp_path / "journal.sqlite3"
    job = json.dumps({"way": "job", "fault": "gone", "tokens": 8})
    ran = subprocess.run(
        ["oomguard", "run", "--journal", str(journal), "--", "python", ENGINE, job],
        cwd=tmp_path,
        env=vllm_env,
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    said = re.search(r"It worked before with smaller steps: tokens=(\d+)", ran.stdout)
    assert said is not None
    learned_tokens = int(said[1])
    assert learned_tokens < 512
    first, last = Journal(journal).records()
    assert "OG397" in ran.stderr
    assert first.incident["causes"][0]["id"] == "batch_too_large"
    assert last.settings == {"max_num_batched_tokens": learned_tokens}
    result = json.loads(ran.stdout.rpartition("RESULT ")[2].partition("\n")[0])
    assert result["most_tokens"] == learned_tokens
    assert result["failed_steps"] == 0
    assert result["finished"] == 16


def test_a_server_keeps_ten_streams_while_one_request_fails(vllm_env):
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo_survive.py")],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    assert "10 of 10 streams gave their 300 tokens" in ran.stdout
    assert ran.stdout.count("-> HTTP 500") == 2
    assert ran.stdout.count("It tried to allocate 57.33 MiB") == 2
    assert "It was not run again." in ran.stdout
    healthy, asked = re.findall(r"/health: (\d+) of (\d+)", ran.stdout)[0]
    assert healthy == asked
