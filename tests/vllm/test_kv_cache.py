"""The closed form of the KV cache equals the real vLLM's own planning, to the block, over many architectures."""

from __future__ import annotations

import json

import pytest

import kv_cache

# One or two of each kind of layers, so that the suite stays in minutes; `python benchmarks/kv_cache.py` takes all.
NAMES = (
    "llama-3.1-8b",
    "codellama-7b",
    "mistral-7b-v0.1",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
    "gemma-2-9b",
    "gemma-3-1b",
    "phi-3-mini",
    "gpt-oss-20b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "cohere2-7b",
    "olmo3-7b",
    "gpt2",
    "opt-125m",
    "falcon-7b",
    "falcon-40b",
    "minicpm3-4b",
    "mamba-130m",
    "mamba2-130m",
    "granite-4.0-h",
    "falcon-h1-0.5b",
    "jamba-mini",
    "zamba2",
    "nemotron-h-8b",
    "qwen3-next",
    "lfm2-1.2b",
    "llama4",
    "gemma-3n",
)


# Those that run on every machine: full attention, a window beside it, latent attention, states beside attention.
FEW = ("llama-3.1-8b", "gemma-3-1b", "deepseek-v2-lite", "jamba-mini")


@pytest.mark.timeout(1800)  # thirty engines, one after the other
@pytest.mark.usefixtures("vllm_env")
@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param([n for n in NAMES if n not in FEW], marks=pytest.mark.breadth)],
    ids=["few", "the others"],
)
def test_blocks_tokens_and_concurrency_equal_the_engine_s(names):
    models = json.loads(kv_cache.MODELS.read_text())
    seen, different = 0, {}
    for answer in kv_cache.engine_answers(list(names)):
        assert "error" not in answer, answer
        plan = kv_cache.ours(models[answer["name"]], answer)
        mine = (plan.kv_cache_blocks, plan.kv_cache_tokens, pytest.approx(plan.max_concurrency))
        seen += 1
        if mine != (answer["blocks"], answer["tokens"], answer["max_concurrency"]):
            different[answer["name"]] = (mine, answer)

    assert seen == len(names)
    assert not different
