"""A call of a causal model over more tokens than fit: run over some at a time, with the same result."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import VOCAB, assert_same, made, whole_and_in_parts  # noqa: E402

from oomguard.engines.transformers.forward_variants import run_in_chunks, why_not_in_chunks  # noqa: E402

TOKENS = 256


@pytest.fixture(scope="module")
def llama():
    return made("LlamaForCausalLM", attention="sdpa", bos_token_id=1, eos_token_id=None)


def one_row(rows=1, pads=0):
    ids = torch.randint(3, VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


OPTIONS = {
    "padded": {"pads": 9},
    "some logits": {"logits_to_keep": 70},
    "no cache": {"use_cache": False},
    "loss": {"labels": True},
    "several rows": {"rows": 3},
}


def test_a_call_in_chunks_gives_what_the_whole_call_gives(subtests, llama):
    for name, value in OPTIONS.items():
        tokens = 100
        with subtests.test(name=name, tokens=tokens):
            options = dict(value)
            batch = one_row(options.pop("rows", 1), options.pop("pads", 0))
            if options.pop("labels", False):
                options["labels"] = batch["input_ids"].masked_fill(torch.arange(TOKENS) < 40, -100)
            with torch.no_grad():
                whole = llama(**batch, **options)
                with run_in_chunks(llama, tokens):
                    parts = llama(**batch, **options)

            assert "forward" not in vars(llama)
            if value.get("pads"):  # what a hidden token says is nothing
                assert_same(whole.logits[:, 9:], parts.logits[:, 9:])
            else:
                assert_same(whole, parts)


def test_row_too_long_runs_in_chunks_and_later_ones_too(llama):
    def call():
        with torch.no_grad():
            return [llama(**one_row(), logits_to_keep=1).logits for _ in range(2)]

    whole, parts, g = whole_and_in_parts(call, 0.6)

    assert_same(whole, parts)
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", "", ""]
    assert g.attempts[1].patches[0].setting == "prefill_chunk_size"


FAMILIES = {
    "MistralForCausalLM": {"sliding_window": 24, "num_key_value_heads": 2},
}


def test_other_families_give_the_same_in_chunks(subtests):
    for name, value in FAMILIES.items():
        with subtests.test(name=name):
            model = made(name, **value)
            assert why_not_in_chunks(model, one_row()) is None
            with torch.no_grad():
                whole = model(**one_row(rows=2))
                with run_in_chunks(model, 100):
                    parts = model(**one_row(rows=2))

            assert_same(whole, parts)


def test_what_is_not_of_tokens_is_told(llama):
    roberta = made("RobertaForCausalLM", is_decoder=False)
    classifier = made("BertForSequenceClassification", attention="sdpa", num_labels=3)

    assert why_not_in_chunks(llama, one_row()) is None
    assert "may look at later tokens" in why_not_in_chunks(roberta, one_row())
    assert "read its tokens in order" in why_not_in_chunks(classifier, one_row())
    assert "output_attentions" in why_not_in_chunks(llama, {**one_row(), "output_attentions": True})
    assert "return_dict" in why_not_in_chunks(llama, {**one_row(), "return_dict": False})
    assert "attention_mask" in why_not_in_chunks(llama, {"attention_mask": torch.ones(1, 1, 4, 4)})


def test_a_row_that_begins_with_padding_is_not_run_in_chunks(llama):
    def call():
        with torch.no_grad():
            return llama(**one_row(pads=9))

    with pytest.raises(torch.OutOfMemoryError) as raised:
        whole_and_in_parts(call, 0.6)
    assert "its rows begin with padding" in "".join(raised.value.__notes__)


PACKED = torch.cat([torch.arange(TOKENS // 2)] * 2)[None]


def test_a_row_of_several_texts_is_not_run_in_chunks(subtests, llama):
    """Without a cache transformers hides them from each other."""

    def check(run):
        given = {"input_ids": one_row()["input_ids"], "position_ids": PACKED}

        def call():
            with torch.no_grad():
                if run == "generate":
                    return llama.generate(**given, max_new_tokens=1, pad_token_id=0)
                return llama(**given, use_cache=False, logits_to_keep=1)

        with pytest.raises(torch.OutOfMemoryError) as raised:
            whole_and_in_parts(call, 0.6)
        assert "prefill_chunk_size" in (notes := "".join(raised.value.__notes__))
        assert "position_ids restart within a row" in notes

    for run in ["generate"]:
        with subtests.test(run=run):
            check(run)


def test_two_threads_leave_the_model_as_it_was(llama):
    begun = threading.Barrier(2)

    def call():
        begun.wait()
        for _ in range(3):
            with torch.no_grad(), run_in_chunks(llama, 64):
                llama(**one_row())

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "forward" not in vars(llama)
