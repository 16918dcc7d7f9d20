"""What another version of vLLM changes for one start: defaults, parts, and the KV cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from oomguard.planning.start import read_start_request
from oomguard.planning.upgrade import plan_upgrade
from support.small_llama import CONFIG


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def compared(model, old, new, **changes):
    old_start, new_start = (
        read_start_request(
            model,
            gpu_memory="24GiB",
            gpu_name="RTX 4090",
            engine_version=version,
            use_calibrations=False,
            **changes,
        )
        for version in (old, new)
    )
    return plan_upgrade(old_start, new_start)


def test_the_parts_explain_the_whole_change_of_the_pool(model):
    found = compared(model, "0.19.1", "0.31.0")
    sizes = {row.name: row.change for row in found.rows}
    parts = sum(
        row.change for row in found.rows if row.kind == "part" and row.name != "utilization"
    )

    assert sizes["KV cache"] == sizes["utilization"] - parts
    assert sizes["CUDA graphs"] > 0
    assert sizes["weights"] == 0


def test_defaults_and_accounting_are_named(model):
    said = "\n".join(compared(model, "0.19.1", "0.31.0").reasons)
    assert "sets gpu_memory_utilization to 0.92 by default, not 0.9" in said
    assert "takes its estimate of the CUDA graphs from the utilization" in said
    back = "\n".join(compared(model, "0.31.0", "0.19.1").reasons)
    assert "no longer takes the CUDA graphs" in back


def test_a_setting_that_the_user_gave_is_no_changed_default(model):
    found = compared(model, "0.19.1", "0.31.0", gpu_memory_utilization=0.9)
    assert "gpu_memory_utilization" not in {row.name for row in found.rows}


def test_the_same_version_changes_nothing(model):
    found = compared(model, "0.31.0", "0.31.0")
    assert not any(row.change for row in found.rows)
    assert (found.reasons, found.pool_ratio) == ((), 1.0)


def run_diff(*words):
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "oomguard", "diff", *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_the_command_prints_one_table_and_json(model):
    asked = ("--upgrade", "0.19.1", "0.31.0", model, "--gpu-memory", "24GiB", "--no-calibration")
    text = run_diff(*asked, "--gpu-name", "RTX 4090")
    assert (text.returncode, text.stderr) == (0, "")
    assert "with vLLM 0.31.0: fits" in text.stdout.splitlines()[0]
    assert text.stdout.count("CUDA graphs") >= 2
    assert text.stdout.splitlines()[-1].startswith("vllm serve")

    record = json.loads(run_diff(*asked, "--format", "json").stdout)
    pool = next(row for row in record["rows"] if row["name"] == "KV cache")
    assert pool["from"] == record["old"]["kv_cache_pool_bytes"]
    assert pool["to"] == record["new"]["kv_cache_pool_bytes"]


def test_wrong_words_are_refused_in_one_message(model, subtests):
    for words, message in [
        (("--upgrade", "0.19.1", "0.31.0"), "--upgrade needs a model"),
        (("--upgrade", "0.19.1", "new", model, "--gpu-memory", "24GiB"), "must be a version"),
        (("--upgrade", "0.19.1", "0.31.0", model, "--gpu-memory", "24"), "without a unit"),
        (("a.log", "b.log", "c.log"), "unexpected extra argument"),
        (("a.log", "b.log", "--nonsense"), "--nonsense"),
    ]:
        with subtests.test(words=words):
            ran = run_diff(*words)
            assert (ran.returncode, ran.stdout) == (2, "")
            assert message in ran.stderr
            assert "Traceback" not in ran.stderr
