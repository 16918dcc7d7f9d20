"""Calls of a model that are not split: what comes out is the first failure as it was, with the reason in its notes."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.forward import ForwardCall  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

ROWS, TOKENS, VOCAB = 8, 64, 64
# Attention that keeps no scores would help most of them: see test_attention.py.
PINNED = {"pin": ["attn_implementation"]}


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.fixture
def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, vocab_size=VOCAB, num_labels=3)
    return transformers.BertForSequenceClassification._from_config(
        config, attn_implementation="eager"
    ).eval()


@pytest.fixture
def ids():
    return torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def notes_of(call):
    """The notes of the failure that leaves the guard, and the attempts."""
    with limit_memory("1 GiB") as device:
        call()
        capacity = device.peak_bytes // 2
    with (
        limit_memory(capacity),
        pytest.raises(torch.OutOfMemoryError) as raised,
        oomguard.guard(**PINNED) as g,
    ):
        call()
    return "\n".join(raised.value.__notes__), g.attempts


def test_recorded_gradients_forbid_a_split(bert, ids):
    notes, attempts = notes_of(lambda: bert(input_ids=ids).logits)
    assert "records gradients" in notes
    assert "inference_mode" in notes
    assert attempts == ()


def test_a_training_step_changes_no_weight(bert, ids):
    weight = bert.classifier.weight.detach().clone()
    optimizer = torch.optim.SGD(bert.parameters(), lr=0.5)

    def step():
        bert(input_ids=ids, labels=torch.arange(ROWS) % 3).loss.backward()
        optimizer.step()

    with limit_memory("1 MiB"), pytest.raises(torch.OutOfMemoryError), oomguard.guard():
        step()
    assert torch.equal(bert.classifier.weight, weight)


def test_training_mode_forbids_a_split(bert, ids):
    bert.train()

    def call():
        with torch.no_grad():
            return bert(input_ids=ids).logits

    assert "call model.eval() first" in notes_of(call)[0]


def test_a_hook_of_the_user_forbids_a_split(bert, ids):
    kept = []
    bert.bert.encoder.register_forward_hook(lambda module, args, output: kept.append(output))

    def call():
        kept.clear()
        with torch.no_grad():
            return bert(input_ids=ids).logits

    assert "a hook on bert.encoder would see the rows of each part" in notes_of(call)[0]


def test_an_argument_that_may_not_hold_rows_forbids_a_split(subtests, bert, ids):
    for arguments, reason in [
        (
            {"row_weights": torch.ones(ROWS + 1)},
            "the argument row_weights has one row per input",
        ),
        (
            {"position_ids": torch.zeros(3, ROWS, TOKENS)},
            "does not know whether the argument position_ids",
        ),
        (
            {"attention_mask": torch.ones(ROWS + 1, TOKENS)},
            "does not know whether the argument attention_mask",
        ),
        (
            {"pixel_values": torch.zeros(ROWS + 1, 3, 8, 8)},
            "does not know which rows the argument pixel_values",
        ),
        (
            {"past_key_values": transformers.DynamicCache()},
            "the call extends the argument past_key_values",
        ),
        ({"cache": transformers.DynamicCache()}, "the call extends the argument cache"),
        ({"names": ["a"] * ROWS}, f"names has {ROWS} entries too"),
        (
            {"image_grid_thw": torch.ones(ROWS + 2, 3)},
            "does not know whether the argument image_grid_thw",
        ),
    ]:
        with subtests.test(arguments=arguments, reason=reason):
            assert (
                reason in ForwardCall.of(bert, (), {"input_ids": ids, **arguments}).not_splittable
            )


def test_a_normalization_in_training_mode_forbids_a_split(bert, ids):
    bert.norm = torch.nn.BatchNorm1d(4)
    with torch.no_grad():
        assert (
            "norm is in training mode"
            in ForwardCall.of(bert, (), {"input_ids": ids}).not_splittable
        )


def test_one_row_that_is_too_long_is_told(bert, ids):
    def call():
        with torch.no_grad():
            return bert(input_ids=ids[:1]).logits

    notes, attempts = notes_of(call)
    assert "training" not in notes
    assert "During generation" not in notes
    assert "prefill_chunk_size" in notes
    assert len(attempts) == 1


def test_what_is_no_memory_failure_comes_out_at_once_as_it_is(bert, ids):
    with pytest.raises(IndexError) as raised, oomguard.guard() as g, torch.no_grad():
        bert(input_ids=ids + VOCAB)
    assert not getattr(raised.value, "__notes__", [])
    assert g.attempts == ()


def test_a_call_outside_a_guard_is_as_it_was(bert, ids):
    with oomguard.guard():
        pass
    with limit_memory("1 MiB"), pytest.raises(torch.OutOfMemoryError) as raised, torch.no_grad():
        bert(input_ids=ids)
    assert not getattr(raised.value, "__notes__", [])


class Features(torch.nn.Module):
    """As a module of sentence-transformers: features in, the same features and what was found out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features):
        ids = {"input_ids": features["input_ids"], "attention_mask": features["attention_mask"]}
        features["embedding"] = self.model.forward(**ids).logits
        return features


def test_a_dict_of_features_is_cut_and_put_together(bert, ids):
    from oomguard.engines.transformers.library_calls import FeaturesCall
    from oomguard.guarding.collate import OutputCollector

    def batch():
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "modality": "text"}

    module = Features(bert)
    with torch.no_grad():
        whole, call = module(batch()), FeaturesCall.of(module, (batch(),), {})
        assert (call.not_splittable, call.rows) == (None, ROWS)
        gathered = OutputCollector(ROWS, weigh=call.weigh)
        for start, stop in ((0, 3), (3, ROWS)):
            args, kwargs = call.part(start, stop)
            assert gathered.add(module(*args, **kwargs), stop - start) is None
    joined = gathered.result()
    assert list(joined) == list(whole)
    assert joined["modality"] == "text"
    assert torch.equal(joined["input_ids"], ids)
    torch.testing.assert_close(joined["embedding"], whole["embedding"])
