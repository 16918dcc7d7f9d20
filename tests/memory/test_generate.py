from __future__ import annotations

from dataclasses import replace

import pytest

from oomguard.memory.generate import generate_row_bytes
from oomguard.memory.model_config import ModelConfig

LLAMA_8B = ModelConfig(
    layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, dtype_bytes=2
)
GIB = 2**30


def test_an_8b_prefill_is_what_a_fake_tensor_run_gives():
    """0.955 GiB over the weights at 4096 tokens (memory-model.md); the expanded heads and logits come on top here."""
    row = generate_row_bytes(LLAMA_8B, 4096, 1)
    assert 0.955 * GIB <= row <= 1.15 * GIB


def test_eager_attention_grows_with_the_square_of_the_length():
    """Measured for an 8B in bf16: 5.72 GiB more at 4096 tokens; the MLP's peak does not come at the same time."""
    sdpa, eager = (generate_row_bytes(LLAMA_8B, 4096, 1, eager=eager) for eager in (False, True))
    assert eager - sdpa == pytest.approx(5.72 * GIB, rel=0.25)
    assert generate_row_bytes(LLAMA_8B, 8192, 1, eager=True) > 3.5 * eager


def test_a_long_answer_is_counted_by_its_cache():
    short, long = generate_row_bytes(LLAMA_8B, 16, 16), generate_row_bytes(LLAMA_8B, 16, 8192)
    assert long - short >= 8176 * 131072


def test_twice_the_element_size_is_twice_the_bytes():
    one, two = (generate_row_bytes(replace(LLAMA_8B, dtype_bytes=size, vocab=1), 1024, 1) for size in (2, 4))
    assert two == pytest.approx(2 * one, rel=0.001)


def test_padding_adds_a_mask():
    plain, padded = (generate_row_bytes(LLAMA_8B, 4096, 1, padded=padded) for padded in (False, True))
    assert padded - plain == 4096 * 4096
