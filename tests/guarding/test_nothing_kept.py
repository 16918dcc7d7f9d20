"""What a failure that was handled leaves behind: nothing, without a collection."""

from __future__ import annotations

import gc
import weakref

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


@pytest.fixture
def without_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forward(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def generate(model, batch):
    return model.generate(**batch, do_sample=False, max_new_tokens=2)


def test_handled_failure_keeps_neither_inputs_nor_result(subtests, llama, without_collection):
    def check(call):
        with limit_memory("4 GiB") as device:
            call(llama, padded())
            capacity = int(device.peak_bytes * 0.6)

        def used():
            batch = padded()
            with limit_memory(capacity), oomguard.guard() as g:
                result = call(llama, batch)
            assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", ""]
            return [weakref.ref(value) for value in (*batch.values(), result)]

        assert [kept() for kept in used()] == [None, None, None]

    for call in [forward, generate]:
        with subtests.test(call=call):
            check(call)


def test_later_call_that_fails_keeps_nothing_either(subtests, llama, without_collection):
    def check(call):
        with limit_memory("4 GiB") as device:
            call(llama, padded())
            capacity = int(device.peak_bytes * 0.6)

        def used(g, rows, tokens):
            batch = padded(rows, tokens)
            result = call(llama, batch)
            return [weakref.ref(value) for value in (*batch.values(), result)]

        with limit_memory(capacity) as device, oomguard.guard() as g:
            first = used(g, 16, 96)
            device.capacity_bytes = int(capacity * 0.8)
            later = used(g, 16, 110)  # begins with what is known, which does not fit any more
        assert sum(attempt.error == "OutOfMemoryError" for attempt in g.attempts) >= 1
        assert {kept() for kept in (*first, *later)} == {None}

    for call in [forward, generate]:
        with subtests.test(call=call):
            check(call)


def test_raised_failure_keeps_nothing_alive_once_released(llama, without_collection):
    def used():
        batch = padded()
        with limit_memory("200 KiB"), pytest.raises(torch.OutOfMemoryError), oomguard.guard():
            forward(llama, batch)
        return [weakref.ref(value) for value in batch.values()]

    assert [kept() for kept in used()] == [None, None]
