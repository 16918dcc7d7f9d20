"""Rows that own code takes apart: what is carried from one to the next is seen, and rows that stay by themselves are left alone."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from oomguard.memory.generate.follow_rows import FollowedCall, together  # noqa: E402

ROWS, TOKENS, WIDTH = 6, 8, 16


class Model(torch.nn.Module):
    """Runs a function on what a layer makes of the rows."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = torch.nn.Linear(WIDTH, WIDTH), function
        self.gru, self.cell = torch.nn.GRU(WIDTH, WIDTH), torch.nn.GRUCell(WIDTH, WIDTH)
        self.lstm = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.block = torch.nn.TransformerEncoderLayer(WIDTH, 2, 32)
        self.block_of_rows = torch.nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)

    def forward(self, states):
        return self.function(self, self.layer(states))


def followed(function, states):
    """Follow the rows of a call of ``function``."""
    call = FollowedCall(
        Model(function).eval(),
        lambda change: {"states": change(states)},
        ROWS,
        lambda model, arguments: model(**arguments),
        mask_is_full=False,
        is_library=lambda name: name.partition(".")[0] in ("torch", "transformers"),
    )
    return together(call)


def is_apart(function):
    """Return whether a call of ``function`` keeps its rows apart."""
    return followed(function, torch.randn(ROWS, TOKENS, WIDTH)).origin is None


def carried(_, x):
    carry, out = 0, []
    for row in x:
        carry = 0.5 * carry + row
        out.append(carry)
    return torch.stack(out)


def neighbours(_, x):
    return torch.stack([row + before for row, before in zip(x, [x[0], *x[:-1]], strict=True)])


def accumulated(_, x):
    return torch.cat(list(itertools.accumulate(x.split(1), torch.maximum)))


def cell_over_rows(model, x):
    state, out = torch.zeros(1, WIDTH), []
    for place in range(len(x)):
        state = model.cell(x[place : place + 1, 0], state)
        out.append(state)
    return torch.cat(out)


def attention_over_rows(_, x):
    line = x[None, None, :, 0]
    return torch.nn.functional.scaled_dot_product_attention(line, line, line)[0, 0]


@pytest.mark.parametrize(
    "function",
    [
        carried,
        neighbours,
        accumulated,
        cell_over_rows,
        attention_over_rows,
        pytest.param(lambda model, x: model.gru(x[:, 0])[0], id="gru"),
        pytest.param(lambda model, x: model.lstm(x[None, :, 0])[0][0], id="lstm"),
        pytest.param(lambda model, x: model.block(x), id="encoder layer"),
        pytest.param(lambda _, x: x[:, 0].renorm(2, 1, 1.0), id="renorm"),
    ],
)
def test_what_makes_one_row_of_another_is_seen(function):
    assert not is_apart(function)


def each_by_itself(_, x):
    return torch.stack([row.softmax(-1) * row.mean() for row in x])


def cell_over_tokens(model, x):
    state = x.new_zeros(len(x), WIDTH)
    for token in range(x.shape[1]):
        state = model.cell(x[:, token], state)
    return state


def tokens_of_a_row(_, x):
    return torch.stack([torch.stack([row[0], row[-1] + row[1]]) for row in x])


def written_to_each(_, x):
    out = torch.zeros_like(x)
    for place in range(len(x)):
        out[place] = x[place] / x[place].norm()
    return out


@pytest.mark.parametrize(
    "function",
    [
        each_by_itself,
        cell_over_tokens,
        tokens_of_a_row,
        written_to_each,
        pytest.param(lambda model, x: model.lstm(x)[0], id="lstm"),
        pytest.param(lambda model, x: model.gru(x.transpose(0, 1))[0].transpose(0, 1), id="gru"),
        pytest.param(lambda model, x: model.block_of_rows(x), id="encoder layer"),
        pytest.param(lambda _, x: x.renorm(2, 0, 1.0), id="renorm"),
    ],
)
def test_rows_that_stay_by_themselves_are_apart(function):
    assert is_apart(function)


def test_a_result_with_as_many_steps_as_the_trace_has_rows_holds_its_rows_along_the_first_axis():
    states = torch.randn(ROWS, 13 * 2, WIDTH)  # 13 is the first number of rows that is tried

    assert followed(lambda _, x: x[:, ::2], states).layout.axes == {"its result": (0, 1)}
