"""``oomguard contribute``: what a start measured, without a word of whose it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.in_process import oomguard_text

LOG = Path(__file__).parents[2] / "examples" / "logs" / "vllm_0.12.0_start_worked.log"
CONFIG = {
    **json.loads(
        (Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json").read_text()
    ),
    "_name_or_path": "/home/mary/secret-model",
    "auto_map": {"AutoModel": "mary/secret--modeling.Secret"},
    "hub token": "hf_abcdefghijklmnop",
    "note": "hf_abcdefghijklmnop",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "marys-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def report(*words):
    return oomguard_text("contribute", *words)


def test_record_has_numbers_and_engine_words_and_no_name(model):
    ran = report(LOG, "--model", model)

    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert record["vllm_version"] == "0.12.0"
    assert record["printed"]["weights_gib"] > 10
    assert record["printed"]["available_kv_gib"] > 1
    assert record["config"]["num_hidden_layers"] == 32
    assert record["config"]["rope_scaling"]["rope_type"] == "llama3"
    assert record["config"]["architectures"] == ["LlamaForCausalLM"]
    for secret in ("mary", "secret", "hf_", str(model.parent)):
        assert secret not in ran.stdout


def test_records_are_appended_to_a_file_line_by_line(model, tmp_path):
    for _ in range(2):
        assert report(LOG, "--model", model, "-o", tmp_path / "starts.jsonl").returncode == 0

    lines = (tmp_path / "starts.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == json.loads(lines[1])


def test_what_it_writes_is_planned_as_the_start_it_came_from(model, tmp_path):
    record = json.loads(report(LOG, "--model", model).stdout)
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    given = [
        "--engine-version",
        record["vllm_version"],
        "--gpu-memory",
        f"{record['gpu_total_gib']}GiB",
    ]
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "plan",
        tmp_path,
        *given,
        "--no-calibration",
        "--format",
        "json",
    ]

    ran = subprocess.run(
        [*map(str, command), *record["flags"]],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    planned = json.loads(ran.stdout)
    assert planned["weights_bytes"] / 2**30 == pytest.approx(
        record["printed"]["weights_gib"], rel=0.01
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2048, "num_attention_heads": 16}, "was measured on a different model"),
        ({"hidden_size": "much"}, "hidden_size"),
    ],
)
def test_a_log_of_another_model_is_refused_with_what_is_wrong(model, changes, message):
    (model / "config.json").write_text(json.dumps(CONFIG | changes))
    ran = report(LOG, "--model", model)

    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""


def test_absurd_figures_and_logs_without_a_start_are_refused(model, tmp_path):
    absurd = tmp_path / "absurd.log"
    told = ("Available KV cache memory: ", "kv cache memory in use is ")
    absurd.write_text(re.sub(f"({'|'.join(told)})", r"\g<1>9", LOG.read_text()))
    nothing = tmp_path / "nothing.log"
    nothing.write_text("hello\n")

    for log, message in ((absurd, "kv_cache_available_bytes is"), (nothing, "no vLLM start")):
        ran = report(log, "--model", model)
        assert ran.returncode == 2
        assert message in ran.stderr
        assert ran.stdout == ""


def test_without_a_model_that_is_here_it_asks_for_one():
    ran = report(LOG)

    assert ran.returncode == 2
    assert "--model FOLDER" in ran.stderr
