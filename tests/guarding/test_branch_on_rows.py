"""A branch that the number of rows decides keeps the call whole: parts would go another way."""

from __future__ import annotations

import pytest

from oomguard.guarding.side_by_side import Part

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import padded, refused  # noqa: E402

from oomguard.engines.transformers.branch_on_rows import why_branches  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class Own(transformers.BertPreTrainedModel):
    """Gives what a function makes of the states."""

    def __init__(self, function):
        super().__init__(transformers.BertConfig(vocab_size=64, **SIZES))
        self.bert, self.function = transformers.BertModel(self.config, add_pooling_layer=False), function
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        return self.function(self, self.bert(input_ids, attention_mask=attention_mask).last_hidden_state)


def even(_, x):
    return x.mean(1) if len(x) % 2 == 0 else x.amax(1)


def large(_, x):
    if x.shape[0] >= 40:
        return x.mean(1)
    return x.amax(1)


def by_size(_, x):
    rows, tokens = x.size()[:2]
    return x.mean(1) if rows > 8 and tokens else x.amax(1)


def by_size_of_one_axis(_, x):
    count = x.size(0) + 1
    return next(x.mean(1) for _ in range(1) if count > 4)


def in_another(_, x):
    return large(_, x)


def empty(_, x):
    return x.mean(1) if len(x) > 0 else x


def alike(_, x):
    other = x * 2
    return x.mean(1) if len(x) == other.shape[0] else x.amax(1)


def raises(_, x):
    if len(x) > 4096:
        raise ValueError(len(x))
    return x.mean(1)


def by_tokens(model, x):
    return x.mean(1) if x.shape[1] > 4 and len(x.shape) == 3 and len(model.bert.encoder.layer) > 1 else x.amax(1)


@pytest.mark.parametrize("function", [even, large, by_size, by_size_of_one_axis, in_another])
def test_a_branch_by_the_number_of_rows_is_seen(function):
    assert "the number of rows decides a branch" in why_branches(Own(function))


@pytest.mark.parametrize("function", [empty, alike, raises, by_tokens])
def test_other_branches_are_no_reason(function):
    assert why_branches(Own(function)) is None


def test_the_line_is_named_and_no_part_runs():
    model = Own(even).eval()

    def call():
        with torch.no_grad():
            return model(**padded(16))

    error, g = refused(call, pin=["attn_implementation"])
    assert f"test_branch_on_rows.py:{even.__code__.co_firstlineno + 1}: len(x) % 2 == 0" in error.__notes__[0]
    assert g.partial is None


def one_by_one(_, x):
    return torch.stack([row.mean(0)[: int(length)] for row, length in zip(x, x[:, 0, 0].long() * 0 + 4, strict=True)])


def test_a_loop_over_rows_is_not_told_as_rows_that_look_at_each_other():
    model = Own(one_by_one).eval()

    def call():
        with torch.no_grad():
            return model(**padded(16))

    error, _ = refused(call, pin=["attn_implementation"])
    assert "goes over the rows one by one, and whether they are apart is not known" in error.__notes__[0]


@pytest.mark.parametrize("rows", [3, 8, 27])
def test_rows_run_alone_in_an_even_number_and_an_odd_one(rows):
    numbers = [len(order) for order in Part(4, 4 + rows, 64).alone().values()]
    assert {number % 2 for number in numbers} == {0, 1}
    assert max(numbers) < rows
