"""Sampling run in parts: each row draws what the whole call would have drawn for it."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import assert_same, made, padded, whole_and_in_parts  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

SAMPLING = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def llama():
    model = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    return model


def seeded(model, batch, **options):
    torch.manual_seed(7)
    tokens = model.generate(**batch, **{**SAMPLING, **options})
    return tokens, torch.rand(3)


def test_rows_that_end_early_draw_on_as_in_the_whole_call(llama):
    whole, parts, _ = whole_and_in_parts(
        lambda: seeded(llama, padded(), eos_token_id=list(range(5, 20)), max_new_tokens=12)
    )

    assert_same(whole, parts)


def test_a_call_that_begins_in_parts_draws_as_the_whole_one(llama):
    with limit_memory("4 GiB") as device:
        whole = [seeded(llama, padded()) for _ in range(2)]
        capacity = int(device.peak_bytes * 0.5)
    with limit_memory(capacity), oomguard.guard() as g:
        parts = [seeded(llama, padded()) for _ in range(2)]

    assert_same(whole, parts)
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", "", ""]


def test_call_with_other_random_draws_is_not_split(llama):
    layer = llama.model.layers[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: (torch.rand(3), own(*args, **kwargs))[1]
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            whole_and_in_parts(lambda: seeded(llama, padded()))
    finally:
        del layer.forward

    assert "draws random numbers" in "".join(raised.value.__notes__)


def test_greedy_rows_leave_the_generator_alone(llama):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    whole_and_in_parts(lambda: llama.generate(**padded(), do_sample=False, max_new_tokens=2))

    assert torch.equal(torch.get_rng_state(), before)
