"""What makes a row of a call depend on those beside it is seen under fake tensors; what changes no row is passed over."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from oomguard.memory.generate.follow_rows import FollowedCall, together  # noqa: E402

ROWS, TOKENS, WIDTH = 6, 8, 5


class Model(torch.nn.Module):
    """Runs a function of its own on what a layer makes of the rows."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = torch.nn.Linear(WIDTH, WIDTH), function
        self.norm = torch.nn.BatchNorm1d(WIDTH, track_running_stats=False)

    def forward(self, states, **others):
        return self.function(self, self.layer(states), **others)


def found(function, **others):
    """What makes the rows of a call of ``function`` depend on each other, None where nothing does."""
    given = {"states": torch.randn(ROWS, TOKENS, WIDTH), **others}
    call = FollowedCall(
        Model(function).eval(),
        lambda change: {name: change(value) for name, value in given.items()},
        ROWS,
        lambda model, arguments: model(**arguments),
        mask_is_full=False,
    )
    return together(call).origin


def by_rows(_, states):
    return torch.stack([row / row.abs().max() for row in states])


def asks_by_rows(model, states):
    states = states.reshape(-1, WIDTH)
    return model.layer(states).view(-1, TOKENS, WIDTH).transpose(0, 1).mean(0)


def through_experts(model, states):
    """Give the tokens that one of two experts is chosen for to it, wherever they are."""
    flat = states.reshape(-1, WIDTH)
    chosen = torch.nn.functional.one_hot((flat.sum(1) > 0).long(), 2)
    found = torch.zeros_like(flat)
    for number in chosen.sum(0).nonzero().flatten():
        (tokens,) = torch.where(chosen[:, number])
        found.index_add_(0, tokens, model.layer(flat[tokens]))
    return found.view_as(states)


APART = {
    "experts over the tokens that are found": through_experts,
    "tokens flattened and back": asks_by_rows,
    "row by row": by_rows,
    "an attention": lambda _, states: torch.nn.functional.scaled_dot_product_attention(states, states, states),
}
TOGETHER = {
    "a sort of rows": lambda _, states: states.sort(0).values,
    "divided by the largest of all": lambda _, states: states / states.amax(),
    "normalized over the batch": lambda model, states: model.norm(states.mean(1)),
    "a branch on the largest": lambda _, states: states * 2 if states.max() > 0 else states,
}


def test_rows_that_do_not_look_at_each_other_are_apart(subtests):
    for name, function in APART.items():
        with subtests.test(name):
            assert found(function) is None


def test_what_makes_a_row_depend_on_others_is_found(subtests):
    for name, function in TOGETHER.items():
        with subtests.test(name):
            assert found(function) is not None


def test_the_place_is_that_of_the_models_own_line():
    origin = found(TOGETHER["divided by the largest of all"])
    assert origin.operation == "amax"
    assert origin.file == __file__
    assert "states / states.amax()" in str(origin)
