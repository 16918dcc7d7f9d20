"""The closed form of the KV cache equals the real vLLM's own planning, to the block, over many architectures."""

from __future__ import annotations

import json

import pytest

import kv_cache

# One more of each kind of layers, so that the suite stays in minutes; `python benchmarks/kv_cache.py` takes all 49.
MORE = (
    "gemma-3-1b",
    "deepseek-v2-lite",
    "mistral-7b-v0.1",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "minicpm3-4b",
    "mamba2-130m",
    "granite-4.0-h",
    "qwen3-next",
    "llama4",
    "gemma-3n",
)


# Those that run on every machine: full attention, and states beside it.
FEW = ("llama-3.1-8b", "jamba-mini")


@pytest.mark.timeout(1800)  # many engines, one after the other
@pytest.mark.usefixtures("vllm_env")
@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param(MORE, marks=pytest.mark.breadth)],
    ids=["few", "more"],
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
