"""A broken configuration on the real engine: one relaunch, nearly the best value; benchmarks/vllm_configs.py has fifteen."""

from __future__ import annotations

import json

import pytest

import vllm_configs


@pytest.mark.usefixtures("vllm_env")
def test_one_relaunch_and_nearly_the_best_value(tmp_path):
    case = vllm_configs.CASES["two settings at once"]
    models = json.loads(vllm_configs.MODELS.read_text()) | {"wide": vllm_configs.WIDE}
    (tmp_path / "config.json").write_text(json.dumps(models[case["model"]]))
    command = [
        str(vllm_configs.PYTHON),
        str(vllm_configs.START),
        "--model",
        str(tmp_path),
        *case["flags"],
    ]

    ran, records = vllm_configs.with_oomguard(command, tmp_path / "journal.sqlite3")

    assert ran.returncode == 0, ran.stderr
    assert len(records) == 2
    assert "STARTED" in ran.stdout
    assert vllm_configs.kept(case, str(tmp_path), ran.stdout, records) > 0.95
