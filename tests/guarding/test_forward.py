"""Plain calls of a model run in parts: what comes back is what the whole call would have given, type by type."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import TOKENS, assert_same, made, ordinary, padded, whole_and_in_parts  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402


@pytest.fixture(scope="module")
def llama():
    return made("LlamaForCausalLM", num_hidden_layers=2, bos_token_id=1, eos_token_id=None)


@pytest.fixture(scope="module")
def classifier():
    return made("BertForSequenceClassification", num_labels=3)


def test_logits_are_those_of_the_whole_call(llama):
    batch = padded()

    def call():
        with torch.inference_mode():
            return llama(**batch).logits

    whole, parts, g = whole_and_in_parts(call)
    assert_same(whole, parts)
    assert g.attempts[-1].succeeded
    assert g.attempts[1].patches[0].setting == "batch_size"


def test_results_that_do_not_fit_together_are_the_reason():
    llama = made("LlamaForCausalLM", vocab_size=8192)
    batch = padded()

    def call():
        with torch.inference_mode():
            return llama(**batch, use_cache=False)

    with limit_memory("1 GiB") as device:
        device.adopt([*llama.parameters(), *batch.values()])
        held = device.live_bytes
        result = call()
    room = int(result.logits.nbytes * 0.8)
    with (
        pytest.raises(torch.OutOfMemoryError) as raised,
        limit_memory(held + room),
        oomguard.guard(),
    ):
        call()
    notes = "\n".join(raised.value.__notes__)
    assert "why: The rows fit in parts, but the results of all" in notes
    assert "batch_too_large" not in notes
    assert raised.value.partial.done == len(result.logits)


def test_every_field_of_a_result_is_put_together(subtests, llama):
    def check(options):
        batch = padded()

        def call():
            with torch.no_grad():
                return llama(**batch, **options)

        whole, parts, g = whole_and_in_parts(call, 0.8)
        assert_same(whole, ordinary(parts))
        assert len(g.attempts) == 2  # states that the model keeps are counted

    for options in [
        {},
        {"return_dict": False},
        {"output_hidden_states": True},
    ]:
        with subtests.test(options=options):
            check(options)


def test_a_cache_that_was_put_together_serves_the_next_call(llama):
    batch = padded()

    def call():
        with torch.no_grad():
            first = llama(**batch, use_cache=True)
            token = first.logits[:, -1:].argmax(-1)
            mask = torch.cat([batch["attention_mask"], torch.ones_like(token)], 1)
            second = llama(
                input_ids=token, attention_mask=mask, past_key_values=first.past_key_values
            )
            return second.logits, second.past_key_values

    assert_same(*whole_and_in_parts(call, 0.6)[:2])


def test_a_mask_and_positions_for_all_rows_are_given_whole(llama):
    batch = padded()
    positions = torch.arange(TOKENS)[None]

    def call():
        with torch.no_grad():
            return llama(**batch, position_ids=positions).logits

    assert_same(*whole_and_in_parts(call)[:2])


def test_compiled_model_with_the_watched_call_has_whole_graphs():
    model, batch = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None), padded(2)
    with torch.no_grad():
        whole = model(**batch, use_cache=False).logits
        with oomguard.guard():
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert_same(whole, compiled(**batch, use_cache=False).logits)


def test_the_next_call_begins_with_the_rows_that_fitted(classifier):
    batch = {"input_ids": padded()["input_ids"].clamp(min=3)}

    def call():
        with torch.no_grad():
            return [classifier(**batch).logits for _ in range(4)]

    whole, parts, g = whole_and_in_parts(call)
    assert_same(whole, parts)
    errors = [bool(attempt.error) for attempt in g.attempts]
    assert errors[0]
    assert not any(errors[errors.index(False) :])


def test_call_that_fits_records_no_attempt_and_is_unchanged(classifier):
    with oomguard.guard() as g, torch.no_grad():
        result = classifier(**padded(4))
    assert g.attempts == ()
    assert result.logits.shape == (4, 3)


def test_results_that_leave_no_room_for_rows_wait_on_the_host(llama):
    """A loop that keeps all results on the device runs fewer rows at a time than the guard."""
    batch, weights = padded(32, 24), [*llama.parameters(), *llama.buffers()]

    def call(rows):
        with torch.no_grad():
            return llama(
                **{name: value[:rows] for name, value in batch.items()}, output_hidden_states=True
            )

    with limit_memory("4 GiB") as device:
        device.adopt(weights)
        whole = call(32)
        results = device.live_bytes - sum(tensor.nbytes for tensor in (*weights, *batch.values()))
        capacity = device.live_bytes + results // 4
    with limit_memory(capacity) as device, oomguard.guard() as g:
        device.adopt(weights)
        parts = call(32)
    assert_same(whole, ordinary(parts))
    assert [attempt.succeeded for attempt in g.attempts] == [False, True]
    assert g.attempts[1].settings["batch_size"] > 10  # 5 with all results on the device
