"""The guard on a real local Ray: all of it is done once, in a process of its own (``guarded_work.py``), and told here piece by piece."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

WORK = Path(__file__).with_name("guarded_work.py")
SQUARES = [number**2 for number in range(10)]


@pytest.fixture(scope="module")
def told(folder_of_run: Path) -> dict[str, Any]:
    """What was done on Ray, as JSON; of several pytest workers one does it."""
    pytest.importorskip("ray")
    kept = folder_of_run / "on-ray.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with tempfile.TemporaryDirectory(
                prefix="ray-", dir="/tmp"
            ) as folder:  # a socket's path is short
                variables = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
                variables.pop("RAY_ADDRESS", None)
                ran = subprocess.run(
                    [sys.executable, str(WORK)],
                    capture_output=True,
                    text=True,
                    env=variables,
                    timeout=500,
                    check=False,
                )
            assert ran.returncode == 0, ran.stderr[-3000:]
            kept.write_text(ran.stdout.splitlines()[-1])
    return dict(json.loads(kept.read_text()))


def test_guarded_function_is_a_task_that_splits_where_it_runs(told: dict[str, Any]):
    done = told["tasks"]["below"]
    assert done["squares"] == SQUARES
    assert done["sizes"][0] == 10
    assert done["sizes"][-1] <= 3


def test_another_worker_begins_with_what_the_first_one_learned(told: dict[str, Any]):
    first, second = told["tasks"]["below"], told["tasks"]["below again"]
    assert second["process"] != first["process"]
    assert second["squares"] == SQUARES
    assert max(second["sizes"]) <= 3


def test_guarded_remote_function_keeps_its_options(told: dict[str, Any]):
    assert told["tasks"]["is remote"] == "RemoteFunction"
    assert told["tasks"]["its options"] == {"num_cpus": 1, "max_retries": 0}
    for how in ("above", "above, with options"):
        assert told["tasks"][how]["squares"] == SQUARES


def test_a_method_of_an_actor_is_split(subtests, told):
    for how in ["below", "above"]:
        with subtests.test(how=how):
            assert told["actors"][how]["squares"] == SQUARES
            assert told["actors"][how]["sizes"][-1] <= 3


def test_async_and_streaming_methods_work_as_before(told: dict[str, Any]):
    assert told["actors"]["async"] == 7
    assert told["actors"]["stream"] == [1, 2]


def test_failure_in_an_actor_is_explained_there_and_unwrapped(subtests, told):
    for what in ["method fails", "async method fails", "start fails"]:
        with subtests.test(what=what):
            found = told["actors"][what]
            assert found["kinds"] == ["cuda_oom"]
            assert found["guard"] == "cuda_oom"
            assert found["facts"]["device_total_bytes"] == int(79.25 * 2**30)


def test_exception_reported_in_its_worker_is_not_repeated(told: dict[str, Any]):
    notes = told["actors"]["method fails"]["notes"]
    assert "".join(notes).count("CUDA out of memory: 20.00 MiB requested") == 1
    assert len(notes) == 2  # and why it did not run in parts


def test_a_tasks_error_is_unwrapped_to_its_cause(told: dict[str, Any]):
    found = told["failures"]["raised"]
    assert found["type"] == "RayTaskError(RuntimeError)"
    assert found["kinds"] == ["cuda_oom"]
    assert found["guard"] == "cuda_oom"


def test_worker_dead_for_unknown_reasons_is_no_oom(subtests, told):
    for what in ["killed", "actor killed"]:
        with subtests.test(what=what):
            found = told["failures"][what]
            assert found["type"] in ("WorkerCrashedError", "ActorDiedError")
            assert found["kinds"] == []


def test_other_error_that_quotes_an_oom_message_is_no_oom(told: dict[str, Any]):
    assert told["failures"]["something else"]["kinds"] == []
    assert told["failures"]["something else"]["notes"] == []


def test_ray_memory_monitor_kill_is_host_memory(told: dict[str, Any]):
    found = told["retried"]["monitor"]
    assert found["type"] == "OutOfMemoryError"
    assert found["kinds"] == ["host_oom"]
    assert found["guard"] == "host_oom"
    assert 0 < found["facts"]["host_used_bytes"] <= found["facts"]["host_total_bytes"], found[
        "facts"
    ]


def test_task_killed_by_the_memory_monitor_starts_smaller(subtests, told):
    for which in ["split", "floored"]:
        with subtests.test(which=which):
            done = told["retried"][which]
            assert done["squares"] == SQUARES
            assert done["sizes"][0] <= 5
            assert any(
                "with fewer rows: " in line and "10 -> 5" in line
                for line in told["retried"]["said"]
            )


def test_the_next_task_begins_as_the_one_that_was_killed_ended(told: dict[str, Any]):
    assert max(told["retried"]["split again"]["sizes"]) <= 5


def test_a_floor_holds_after_a_kill_too(told: dict[str, Any]):
    assert min(told["retried"]["floored"]["sizes"]) == 5


def test_killed_task_without_rows_is_rerun_unchanged_and_says_so(told: dict[str, Any]):
    assert told["retried"]["whole"] == "ran"
    (said,) = [line for line in told["retried"]["said"] if "as it was" in line]
    assert 'killed_by="Ray\'s memory monitor"' in said
    assert "guard(batch=...)" in said


def test_the_plugin_and_its_changes_reach_the_workers_of_a_job(told: dict[str, Any]):
    seen = told["job's environment"]
    assert json.loads(seen["overrides"]) == {"max_model_len": 1024}
    assert seen["own"] == "kept"
    assert "oomguard.engines.vllm.plugin:register" in seen["plugins"]
    assert seen["shipped"] == 1


def test_a_tasks_own_environment_changes_what_the_job_said(told: dict[str, Any]):
    assert json.loads(told["task's environment"]["overrides"]) == {"max_model_len": 2048}
