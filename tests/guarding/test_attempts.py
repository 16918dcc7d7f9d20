"""``g.attempts``: those of calls that ran out of memory, or began another way; a call that succeeds at once leaves none."""

from __future__ import annotations

import asyncio

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import made, padded  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402


@pytest.fixture(scope="module")
def llama():
    model = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    return model


def forward(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def generate(model, batch):
    return model.generate(**batch, do_sample=False, max_new_tokens=2)


def test_call_that_succeeds_at_once_records_no_attempt(subtests, llama):
    for call in [forward, generate]:
        with subtests.test(call=call):
            with limit_memory("4 GiB") as device:
                call(llama, padded())
                capacity = int(device.peak_bytes * 0.6)
            with limit_memory(capacity), oomguard.guard() as g:
                call(llama, padded(2))
                assert g.attempts == ()
                call(llama, padded())
                call(llama, padded(2))
            assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", ""]


def test_a_call_that_begins_with_fewer_rows_shows_them(llama):
    with limit_memory("4 GiB") as device:
        generate(llama, padded())
        capacity = int(device.peak_bytes * 0.6)
    with limit_memory(capacity), oomguard.guard() as g:
        generate(llama, padded())
        generate(llama, padded())
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", "", ""]
    assert g.attempts[-1].settings["batch_size"] < len(padded()["input_ids"])


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_long_cached_prompt_begins_in_chunks_once_needed():
    model = made(
        "LlamaForCausalLM",
        attention="sdpa",
        bos_token_id=1,
        eos_token_id=None,
        max_position_embeddings=2048,
    )
    ids = torch.randint(3, 64, (1, 900), generator=torch.Generator().manual_seed(1))

    def call():
        cache = transformers.DynamicCache(config=model.config)
        return model.generate(
            ids, past_key_values=cache, do_sample=False, max_new_tokens=2, pad_token_id=0
        )

    with limit_memory("4 GiB") as device:
        whole = call()
        capacity = int(device.peak_bytes * 0.74)
    with limit_memory(capacity), oomguard.guard() as g:
        is_equal = torch.equal(call(), whole)
        first = len(g.attempts)
        is_equal &= torch.equal(call(), whole)
    assert is_equal
    later = g.attempts[first:]
    assert [(attempt.error, "prefill_chunk_size" in attempt.settings) for attempt in later] == [
        ("", True)
    ]


def test_async_function_with_a_batch_is_refused_with_advice():
    async def embed(texts):
        await asyncio.sleep(0)
        return texts

    with pytest.raises(oomguard.SettingError, match="embed is async and cannot be split") as raised:
        oomguard.guard(batch="texts")(embed)
    assert "without batch=" in str(raised.value)
