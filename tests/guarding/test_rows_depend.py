"""Rows that depend on those beside them are not run in parts: splitting would change answers without a word."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from oomguard.testing import limit_memory  # noqa: E402

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
PINNED = {"pin": ["attn_implementation"]}


def capacity_for(call, share=0.5):
    with limit_memory("4 GiB") as device:
        call()
    return int(device.peak_bytes * share)


def phi(rope):
    torch.manual_seed(1)
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 200, "initializer_range": 0.3}
    config = transformers.Phi3Config(
        **sizes,
        max_position_embeddings=512,
        original_max_position_embeddings=32,
        rope_parameters=rope,
        pad_token_id=0,
    )
    config.eos_token_id = None
    return transformers.Phi3ForCausalLM(config).eval()


def prompts(longest, rows=12, tokens=48):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(8, 16, (rows,), generator=generator)
    lengths[-1] = longest
    mask = (torch.arange(tokens) >= (tokens - lengths)[:, None]).long()
    ids = torch.randint(3, 200, (rows, tokens), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 32,
}


def test_a_row_beyond_the_original_window_keeps_longrope_whole():
    model, given = phi(LONGROPE), prompts(longest=28)
    capacity = capacity_for(lambda: model.generate(**given), 0.7)
    with limit_memory(capacity), pytest.raises(torch.OutOfMemoryError) as raised, oomguard.guard():
        model.generate(**given)
    assert "positions by longrope depend on the longest row" in "".join(raised.value.__notes__)
