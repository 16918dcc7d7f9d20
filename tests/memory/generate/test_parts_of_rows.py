"""Rows that own code takes apart: what is carried from one to the next is seen, and rows that stay by themselves are left alone."""

from __future__ import annotations

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
        self.gru = torch.nn.GRU(WIDTH, WIDTH)
        self.lstm = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)

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


def test_what_makes_one_row_of_another_is_seen(subtests):
    for name, function in [
        ("a loop", carried),
        ("gru", lambda model, x: model.gru(x[:, 0])[0]),
    ]:
        with subtests.test(name):
            assert not is_apart(function)


def each_by_itself(_, x):
    return torch.stack([row.softmax(-1) * row.mean() for row in x])


def test_rows_that_stay_by_themselves_are_apart(subtests):
    for name, function in [
        ("a loop", each_by_itself),
        ("lstm", lambda model, x: model.lstm(x)[0]),
    ]:
        with subtests.test(name):
            assert is_apart(function)
