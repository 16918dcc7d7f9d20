"""Failures whose right knob is none that the engine's message names, on the real engine: one relaunch, the outputs kept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import vllm_configs
from oomguard.journal.store import Journal

MODELS = json.loads(vllm_configs.MODELS.read_text())
# One small layer with the vocabulary of Llama 3.
SCORED = MODELS["llama-3.1-8b"] | {
    "vocab_size": 128256,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
# What the process may map: room for the engine and for the logits of some 2500 tokens with their copies.
LIMIT_KIB = 7_000_000


def test_prompt_log_probabilities_use_smaller_steps(folder: Path, vllm_env, tmp_path):
    """The seed's failure: 8190 x 128256 logits in float32 do not fit, and steps that do are found at once."""
    (folder / "scored").mkdir()
    (folder / "scored" / "config.json").write_text(json.dumps(SCORED))
    journal = tmp_path / "journal.sqlite3"
    ran = subprocess.run(
        [
            "bash",
            "-c",
            f"ulimit -v {LIMIT_KIB}; exec oomguard run --no-step-recovery --journal {journal} -- python score.py",
        ],
        cwd=folder,
        env=vllm_env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert "SCORED 8191" in ran.stdout, ran.stderr
    first, last = Journal(journal).records()
    assert first.incident["facts"]["allocation"] == "prompt_logprobs"
    assert set(last.settings) == {"max_num_batched_tokens"}
