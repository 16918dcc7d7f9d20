"""The mean loss of rows that ran apart is the mean of them together, where rows have different numbers of labels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.forward import ForwardCall  # noqa: E402
from oomguard.guarding.collate import OutputCollector  # noqa: E402

ROWS, TOKENS, VOCAB = 7, 12, 40
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
}


def bert(head, **options):
    torch.manual_seed(0)
    return getattr(transformers, head)(transformers.BertConfig(**SIZES, **options)).eval()


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def ragged():
    labels = torch.randint(0, 3, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
    for row in range(ROWS):
        labels[row, row + 2 :] = -100
    return labels


CASES = {
    "next_token": (llama, lambda: {"labels": ragged()}),
    "next_token, over a number": (llama, lambda: {"labels": ragged(), "num_items_in_batch": 20}),
    "next_token, over a tensor": (
        llama,
        lambda: {"labels": ragged(), "num_items_in_batch": torch.tensor(20)},
    ),
    "masked": (lambda: bert("BertForMaskedLM"), lambda: {"labels": ragged()}),
    "token": (
        lambda: bert("BertForTokenClassification", num_labels=3),
        lambda: {"labels": ragged()},
    ),
    "row": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        lambda: {"labels": torch.arange(ROWS) % 3},
    ),
    "number": (
        lambda: bert("BertForSequenceClassification", num_labels=1),
        lambda: {"labels": torch.rand(ROWS)},
    ),
    "several": (
        lambda: bert(
            "BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification"
        ),
        lambda: {"labels": (torch.rand(ROWS, 3) > 0.5).float()},
    ),
    "span": (
        lambda: bert("BertForQuestionAnswering"),
        lambda: {"start_positions": torch.arange(ROWS), "end_positions": torch.arange(ROWS) + 2},
    ),
}


def test_the_loss_is_that_of_all_rows(subtests):
    for case, value in CASES.items():
        size = 3
        with subtests.test(case=case, size=size):
            make, labels = value
            model, batch = (
                make(),
                {"input_ids": torch.randint(3, VOCAB, (ROWS, TOKENS)), **labels()},
            )
            with torch.no_grad():
                whole, call = model(**batch), ForwardCall.of(model, (), batch)
                assert call.not_splittable is None
                gathered = OutputCollector(ROWS, weigh=call.weigh)
                for start in range(0, ROWS, size):
                    stop = min(ROWS, start + size)
                    args, kwargs = call.part(start, stop)
                    assert gathered.add(model(*args, **kwargs), stop - start) is None
            torch.testing.assert_close(gathered.result().loss, whole.loss)


def test_unknown_loss_reduction_is_not_put_together():
    model, batch = (
        llama(),
        {"input_ids": torch.randint(3, VOCAB, (ROWS, TOKENS)), "labels": ragged()},
    )
    with torch.no_grad():
        call = ForwardCall.of(model, (), {**batch, "num_items_in_batch": 11})
        args, kwargs = call.part(0, 3)
        part = model(*args, **kwargs)
        part.loss *= 1.5  # as with weights of the labels' own
    assert call.weigh(part, 0, 3) is None
    assert "is one number for all rows" in OutputCollector(ROWS, weigh=call.weigh).add(part, 3)


def test_close_measures_prefer_the_intended_one():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(
            1e-3
        )  # all tokens are as likely: each position's loss is nearly that of any other
    batch = {"input_ids": torch.randint(3, VOCAB, (ROWS, TOKENS)), "labels": ragged()}
    with torch.no_grad():
        assert ForwardCall.of(model, (), batch).weigh(model(**batch), 0, ROWS) == float(
            (batch["labels"][:, 1:] >= 0).sum()
        )
