"""``plan --ask-engine``: vLLM's own planning code, asked without weights or a start, agrees with the closed form."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

MODELS = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "kv_models.json").read_text())
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 512,
    "num_kv_shared_layers": 2,
    "torch_dtype": "float16",
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
}
MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
    "attention_bias": False,
    "layernorm_epsilon": 1e-5,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "torch_dtype": "float16",
    "moe_layer_freq": [0] * 6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.334,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
}
CONFIGS = {
    "mimo-v2": MIMO,
    "gemma-4": GEMMA4,
    "gemma-4 with other heads": {
        **GEMMA4,
        "global_head_dim": 384,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    **{name: MODELS[name] for name in ("llama-3.1-8b", "gemma-3n", "jamba-mini", "deepseek-v2-lite")},
}


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
        [*command, *numbers, *options], env=env, capture_output=True, text=True, timeout=300, check=False
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
MTP = '{"method": "mtp", "num_speculative_tokens": 2}'


def agrees(folder: Path, env: dict[str, str], *options: str) -> None:
    ours, engine = planned(folder, env, *options), planned(folder, env, *options, "--ask-engine")
    assert "laid out by the installed vLLM" in engine["assumptions"][-1]
    assert {name: engine.get(name) for name in NUMBERS} == {name: ours.get(name) for name in NUMBERS}
    assert engine["max_concurrency"] == pytest.approx(ours["max_concurrency"])


@pytest.mark.parametrize(
    "name", ["jamba-mini", *(pytest.param(n, marks=pytest.mark.breadth) for n in CONFIGS if n != "jamba-mini")]
)
def test_the_engine_s_own_layout_is_the_closed_form_s(name, vllm_env, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    agrees(tmp_path, vllm_env)


@pytest.mark.breadth
@pytest.mark.parametrize("ranks", [("-tp", "2"), ("-pp", "2")], ids=" ".join)
def test_so_it_is_over_ranks_and_stages_with_a_draft_model(ranks, vllm_env, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gemma-3-1b"]))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(DRAFT))
    drafting = json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 3})
    agrees(tmp_path, vllm_env, *ranks, "--speculative-config", drafting)


@pytest.mark.breadth
def test_so_it_is_where_a_hybrid_model_drafts_with_its_own_layers(vllm_env, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-next"]))
    agrees(tmp_path, vllm_env, "--speculative-config", MTP)


@pytest.mark.breadth
def test_a_length_that_does_not_fit_is_said_with_the_one_that_does(vllm_env, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["llama-3.1-8b"], "max_position_embeddings": 262144}))
    found = planned(tmp_path, vllm_env, "--ask-engine", "--max-model-len", "262144")
    assert found["fits"] is False
    assert "says vLLM" in found["reasons"][0]
    assert str(planned(tmp_path, vllm_env)["kv_cache_blocks"] * 128 - 128) in found["reasons"][0]
