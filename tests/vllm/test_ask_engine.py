"""``plan --ask-engine``: vLLM's own planning code, asked without weights or a start, agrees with the closed form."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

MODELS = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "data" / "kv_models.json").read_text()
)


def planned(folder: Path, env: dict[str, str], *options: str) -> dict:
    command = [
        "python",
        "-m",
        "oomguard",
        "plan",
        str(folder),
        "--device",
        "cpu",
        "--gpu-memory",
        "4GiB",
        "--format",
        "json",
    ]
    numbers = [
        "--kv-cache-memory-bytes",
        "1GiB",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "512",
        "--max-model-len",
        "4096",
    ]
    ran = subprocess.run(
        [*command, *numbers, *options],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


NUMBERS = ("kv_cache_blocks", "kv_cache_tokens", "block_tokens", "longest_request_tokens", "fits")
DRAFT = {
    **MODELS["llama-3.1-8b"],
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 32,
}


def agrees(folder: Path, env: dict[str, str], *options: str) -> None:
    ours, engine = planned(folder, env, *options), planned(folder, env, *options, "--ask-engine")
    assert "the installed vLLM's own layout" in engine["assumptions"][-1]
    assert {name: engine.get(name) for name in NUMBERS} == {
        name: ours.get(name) for name in NUMBERS
    }
    assert engine["max_concurrency"] == pytest.approx(ours["max_concurrency"])


def test_the_engine_s_own_layout_is_the_closed_form_s(vllm_env, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["jamba-mini"]))
    agrees(tmp_path, vllm_env)


def test_so_it_is_over_ranks_with_a_draft_model(vllm_env, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gemma-3-1b"]))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(DRAFT))
    drafting = json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 3})
    agrees(tmp_path, vllm_env, "-tp", "2", "--speculative-config", drafting)
