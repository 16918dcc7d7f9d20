"""Broken configurations on the real engine: one relaunch, nearly the best value; benchmarks/vllm_configs.py has fifteen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.usefixtures("vllm_env")
@pytest.mark.parametrize("name", ["hybrid of states, length", "nothing left, 4 GiB needed", "two settings at once"])
def test_one_relaunch_and_nearly_the_best_value(monkeypatch, tmp_path, name):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("vllm_configs", None)
    import vllm_configs

    case = vllm_configs.CASES[name]
    models = json.loads((BENCHMARKS / "kv_models.json").read_text()) | {"wide": vllm_configs.WIDE}
    (tmp_path / "config.json").write_text(json.dumps(models[case["model"]]))
    command = [str(vllm_configs.PYTHON), str(BENCHMARKS / "vllm_start.py"), "--model", str(tmp_path), *case["flags"]]

    ran, records = vllm_configs.with_oomguard(command, tmp_path / "journal.sqlite3")

    assert ran.returncode == 0, ran.stderr
    assert len(records) == 2
    assert "STARTED" in ran.stdout
    assert vllm_configs.kept(case, str(tmp_path), ran.stdout, records) > 0.95
