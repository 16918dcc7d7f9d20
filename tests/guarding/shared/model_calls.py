"""Calls of tiny models on a small device, whole and in parts, and whether both gave the same."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from torch.utils._pytree import tree_map_only  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

ROWS, TOKENS, VOCAB = 16, 96, 64
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def made(name, *, attention="eager", **options):
    """A tiny model in float32 with random weights; eager attention is what takes memory."""
    torch.manual_seed(0)
    config = getattr(
        transformers, name.split("For")[0].removesuffix("Model").removesuffix("LMHead") + "Config"
    )
    settings = {
        **SIZES,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        **options,
    }
    return (
        getattr(transformers, name)
        ._from_config(config(**settings), attn_implementation=attention)
        .eval()
    )


def padded(rows=ROWS, tokens=TOKENS, side="left"):
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        if side == "left":
            mask[row, : row * 2] = 0
        else:
            mask[row, tokens - row * 2 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def whole_and_in_parts(call, share=0.5, **options):
    """The result of a call with all the memory, with a share of what it took, and the guard of the second."""
    with limit_memory("4 GiB") as device:
        whole = call()
        capacity = int(device.peak_bytes * share)
    with limit_memory(capacity), pytest.raises(torch.OutOfMemoryError):
        call()
    with limit_memory(capacity), oomguard.guard(**options) as g:
        parts = call()
    return whole, parts, g


def refused(call, share=0.6, **options):
    """The exception of a call that is not run in parts on a share of what it took, and the guard around it."""
    with limit_memory("4 GiB") as device:
        call()
    with (
        limit_memory(int(device.peak_bytes * share)),
        pytest.raises(torch.OutOfMemoryError) as raised,
        oomguard.guard(**options) as g,
    ):
        call()
    return raised.value, g


def ordinary(result):
    """A result with ordinary tensors in place of those whose operations take their rows part by part, as they leave little room."""
    own = lambda tensor: tensor if type(tensor) is torch.Tensor else tensor + 0  # noqa: E731
    return tree_map_only(torch.Tensor, own, result)


def assert_same(whole, parts):
    """Types, fields, shapes and dtypes are equal, numbers to the last bits of float32."""
    assert type(parts) is type(whole)
    if isinstance(whole, torch.Tensor):
        assert (parts.dtype, parts.requires_grad) == (whole.dtype, whole.requires_grad)
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5, equal_nan=True)
    elif hasattr(whole, "keys"):
        assert list(parts) == list(whole)
        for name in whole:
            assert_same(whole[name], parts[name])
    elif isinstance(whole, (list, tuple)):
        assert len(parts) == len(whole)
        for one, other in zip(whole, parts, strict=True):
            assert_same(one, other)
    elif hasattr(whole, "layers"):
        assert_same(
            [(layer.keys, layer.values) for layer in whole.layers],
            [(r.keys, r.values) for r in parts.layers],
        )
    elif hasattr(whole, "self_attention_cache"):
        assert_same(whole.self_attention_cache, parts.self_attention_cache)
        assert_same(whole.cross_attention_cache, parts.cross_attention_cache)
    else:
        assert parts == whole
