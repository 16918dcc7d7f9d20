"""A diagnosis and a plan print as the command line does, and give a dict and Markdown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import oomguard

ROOT = Path(__file__).parents[2]
LOG = "examples/logs/vllm_serve_kv_cache.log"
MODEL = "examples/models/llama-3.1-8b.json"


def command(*words: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "oomguard", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "80", "HOME": str(ROOT / "nowhere")},
    )
    return run.stdout


def test_str_of_a_diagnosis_is_the_panel(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = oomguard.diagnose(path=LOG)

    assert f"{found}\n" == command("diagnose", LOG)
    assert found.to_dict()["verdict"] == "oom"
    assert found.to_markdown().startswith("### vLLM could not start: one request of 32,768 tokens")


def test_str_of_a_plan_is_what_the_command_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    start = oomguard.plan(MODEL, gpu_memory="24GiB", max_model_len=131072, use_calibrations=False)

    assert "does not fit: one request of 131072 tokens needs 16.00 GiB" in str(start)
    assert start.to_dict()["fits"] is False
    assert start.to_markdown().startswith(f"### {MODEL}: does not fit in 24.00 GiB")
    assert "vllm serve" in start.to_markdown()


def test_a_planned_call_has_the_same_forms(monkeypatch):
    monkeypatch.chdir(ROOT)
    call = oomguard.plan(MODEL, engine="transformers", gpu_memory="24GiB", batch_size=4)

    assert "transformers generate, 4 rows" in str(call)
    assert call.to_dict()["batch_size"] == 4
    assert "| weights |" in call.to_markdown()


def test_diagnose_takes_exactly_one_source(tmp_path):
    log = tmp_path / "a.log"
    text = "RuntimeError: CUDA error: out of memory\n"
    log.write_text(text)

    for found in (
        oomguard.diagnose(text=text),
        oomguard.diagnose(path=log),
        oomguard.diagnose(path=str(log)),
        oomguard.diagnose(text),
        oomguard.diagnose(RuntimeError("CUDA error: out of memory")),
    ):
        assert found.verdict == "oom"
    assert oomguard.diagnose(text=str(log)).verdict == "no_oom"
    for wrong in ({}, {"text": text, "path": log}, {"text": 3}, {"path": 3}):
        with pytest.raises(oomguard.UsageError, match="diagnose takes"):
            oomguard.diagnose(**wrong)
