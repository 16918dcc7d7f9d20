"""A model that nobody can read is asked whether its rows look at each other, before a part stands for the whole call."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import padded  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
PINNED = {"pin": ["attn_implementation"]}


class Own(transformers.BertPreTrainedModel):
    """Gives what a function of its own makes of the mean over tokens."""

    def __init__(self, config, function):
        super().__init__(config)
        self.bert, self.function = transformers.BertModel(config, add_pooling_layer=False), function
        self.last = None
        self.calls = 0
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.function(self, states.mean(1), input_ids)


def own(function):
    torch.manual_seed(0)
    return Own(transformers.BertConfig(vocab_size=64, **SIZES), function).eval()


def run(model, rows=16):
    with torch.no_grad():
        return model(**padded(rows))


CHANGES = []


@torch.library.custom_op("oomguard_test_side_by_side::changed", mutates_args=())
def changed(x: torch.Tensor, number: int) -> torch.Tensor:
    return torch.from_numpy(CHANGES[number](x.numpy()))


def by_operation(change):
    """Run a function on numpy's side, in an operation of one's own without a rule for shapes."""
    CHANGES.append(change)
    number = len(CHANGES) - 1
    return lambda model, x, ids: changed(x, number)


def counts(model, x, _):
    model.calls += 1
    return x / model.calls


MIXED = {
    "a mean over rows in an operation": by_operation(lambda x: x - x.mean(0)),
    "the number of rows": lambda model, x, ids: x / len(x),
}
WHY_NOT = (
    "a row depends on those beside it",
    "come out otherwise",
    "takes the values of rows out of torch",
    "the number of rows decides",
    "the place of a row in the batch decides",
)
CHANGED = {
    "counts its calls": (counts, "each call changes calls of the model"),
}


def capacity_for(call, share=0.6):
    with limit_memory("4 GiB") as device:
        call()
    return int(device.peak_bytes * share)


def refused(model):
    """Return the notes of a call that is raised, none of whose rows are given."""
    capacity = capacity_for(lambda: run(model))
    with limit_memory(capacity), pytest.raises(torch.OutOfMemoryError) as raised, oomguard.guard(**PINNED) as g:
        run(model)
    assert g.partial is None
    return "".join(raised.value.__notes__)


def test_rows_that_look_at_each_other_in_code_of_the_users_own_are_not_split(subtests):
    for name, function in MIXED.items():
        with subtests.test(name):
            notes = refused(own(function))
            assert any(why in notes for why in WHY_NOT), notes


def test_what_a_call_changes_beside_its_result_keeps_it_whole(subtests):
    for name, (function, reason) in CHANGED.items():
        with subtests.test(name):
            assert reason in refused(own(function))


def test_rows_that_are_apart_are_split_though_nobody_can_follow_them():
    model = own(by_operation(lambda x: x * 2))
    whole = run(model)
    with limit_memory(capacity_for(lambda: run(model))), oomguard.guard(**PINNED) as g:
        assert torch.allclose(run(model), whole, atol=1e-6)
    assert len(g.attempts) == 2
