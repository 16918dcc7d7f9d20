"""KV cache bytes, checked against published shapes and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.memory.generate import generate_row_bytes
from oomguard.memory.kv_cache import MAX_BLOCK_TOKENS, kv_bytes_per_token, kv_request_bytes
from oomguard.memory.model_config import ModelConfig

LLAMA_31_8B = ModelConfig(32, 4096, 14336, 32, 8, 128, 128256, 2)
QWEN_25_7B = ModelConfig(28, 3584, 18944, 28, 4, 128, 152064, 2)

configs = st.builds(
    ModelConfig,
    st.integers(1, 80),
    st.integers(64, 8192),
    st.integers(64, 32768),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(8, 256),
    st.integers(100, 200_000),
    st.sampled_from([2, 4]),
)


def test_llama_31_8b_needs_128_kib_a_token():
    assert kv_bytes_per_token(LLAMA_31_8B) == 131072


def test_qwen_25_7b_needs_56_kib_a_token():
    assert kv_bytes_per_token(QWEN_25_7B) == 57344


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_ranks_share_the_kv_heads(ranks, heads):
    assert kv_bytes_per_token(LLAMA_31_8B, ranks) == 131072 * heads // 8


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_kv_heads_are_replicated_where_ranks_outnumber_them(ranks):
    assert kv_bytes_per_token(LLAMA_31_8B, ranks) == 131072 // 8


def test_a_request_needs_whole_blocks_and_the_null_block():
    assert kv_request_bytes(10, 1) == 10 * 2 * MAX_BLOCK_TOKENS
    assert kv_request_bytes(10, MAX_BLOCK_TOKENS) == 10 * 2 * MAX_BLOCK_TOKENS
    assert kv_request_bytes(10, MAX_BLOCK_TOKENS + 1) == 10 * 3 * MAX_BLOCK_TOKENS


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 10**4))
def test_a_request_needs_at_least_its_tokens_and_never_less_when_longer(per_token, tokens, more):
    assert kv_request_bytes(per_token, tokens) >= per_token * tokens
    assert kv_request_bytes(per_token, tokens + more) >= kv_request_bytes(per_token, tokens)


@settings(deadline=None)
@given(configs, st.integers(1, 16))
def test_more_ranks_never_need_more_a_rank(config, ranks):
    assert 0 < kv_bytes_per_token(config, ranks + 1) <= kv_bytes_per_token(config, ranks)


@settings(deadline=None)
@given(configs, st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 1000))
def test_a_row_needs_more_the_longer_it_is(config, prompt, new, more):
    row = generate_row_bytes(config, prompt, new)

    assert row >= (prompt + new) * kv_bytes_per_token(config)
    assert generate_row_bytes(config, prompt + more, new) > row
    assert generate_row_bytes(config, prompt, new + more) >= row
    assert generate_row_bytes(config, prompt, new, padded=True) >= row
