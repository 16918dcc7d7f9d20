"""The closed form of the KV cache equals the real vLLM's own planning, to the block, over many architectures."""

from __future__ import annotations

import json

import pytest

import kv_cache

# One of each kind of layers, so that the suite stays in minutes; `python benchmarks/kv_cache.py` takes all 49.
NAMES = ("llama-3.1-8b", "jamba-mini", "gemma-3-1b", "deepseek-v2-lite")


@pytest.mark.timeout(1800)  # many engines, one after the other
@pytest.mark.usefixtures("vllm_env")
def test_blocks_tokens_and_concurrency_equal_the_engine_s():
    models = json.loads(kv_cache.MODELS.read_text())
    seen, different = 0, {}
    for answer in kv_cache.engine_answers(list(NAMES)):
        assert "error" not in answer, answer
        plan = kv_cache.ours(models[answer["name"]], answer)
        mine = (plan.kv_cache_blocks, plan.kv_cache_tokens, pytest.approx(plan.max_concurrency))
        seen += 1
        if mine != (answer["blocks"], answer["tokens"], answer["max_concurrency"]):
            different[answer["name"]] = (mine, answer)

    assert seen == len(NAMES)
    assert not different
