"""What makes a row of a call depend on those beside it is seen under fake tensors; what changes no row is passed over."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from oomguard.memory.generate.follow_rows import FollowedCall, together  # noqa: E402

ROWS, TOKENS, WIDTH = 6, 8, 5
LONG = torch.tensor([[3], [3], [3], [3], [3], [7]]).clamp(max=torch.arange(TOKENS))  # the last row is longer
SHORT = LONG.clamp(max=3)
UNEVEN = SHORT.clone().index_fill_(0, torch.tensor([1]), 2)  # one row is shorter


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


def trims_infinite(_, states):
    return states.clamp(max=1000) if torch.isinf(states).any() else states


def counts_rows(_, states):
    assert len(states.mean((1, 2)).tolist()) == len(states)
    return states


def through_experts(model, states):
    """Give the tokens that one of two experts is chosen for to it, wherever they are."""
    flat = states.reshape(-1, WIDTH)
    chosen = torch.nn.functional.one_hot((flat.sum(1) > 0).long(), 2)
    found = torch.zeros_like(flat)
    for number in chosen.sum(0).nonzero().flatten():
        (tokens,) = torch.where(chosen[:, number])
        found.index_add_(0, tokens, model.layer(flat[tokens]))
    return found.view_as(states)


def with_capacity(_, states):
    flat = states.reshape(-1, WIDTH)
    chosen = (flat.sum(1) > 0).long()
    place = chosen.cumsum(0) - 1
    return (flat * (chosen * (place < 4))[:, None]).view_as(states)


APART = {
    "experts over the tokens that are found": through_experts,
    "a sort of tokens": lambda _, states: states.sort(1).values,
    "layers": lambda model, states: model.layer(states).softmax(-1).cumsum(1),
    "tokens flattened and back": asks_by_rows,
    "a mean over tokens": lambda _, states: states.mean(1),
    "row by row": by_rows,
    "an attention": lambda _, states: torch.nn.functional.scaled_dot_product_attention(states, states, states),
    "a limit for infinite numbers": trims_infinite,
    "a window of tokens rolled": lambda _, states: states.roll(1, 1),
    "zeros of the shape of one value": lambda _, states: states + torch.zeros_like(states.max()),
}
TOGETHER = {
    "experts with so many places": with_capacity,
    "the best of all rows": lambda _, states: (
        states * torch.zeros_like(states).index_fill(0, states.sum((1, 2)).topk(3).indices, 1)
    ),
    "a sort of rows": lambda _, states: states.sort(0).values,
    "rows in another order": lambda _, states: states + states.flip(0),
    "divided by the largest of all": lambda _, states: states / states.amax(),
    "centred over the rows": lambda _, states: states - states.mean(0),
    "a softmax over the rows": lambda _, states: states.softmax(0),
    "rows against rows": lambda _, states: states.mean(1) @ states.mean(1).T,
    "normalized over the batch": lambda model, states: model.norm(states.mean(1)),
    "the first row for all": lambda _, states: states + states[0],
    "a branch on the largest": lambda _, states: states * 2 if states.max() > 0 else states,
    "a number that the program reads": lambda _, states: states * float(states.max()),
    "a vote": lambda _, states: states * [1.0, 2.0, 3.0, 4.0, 5.0][int(states.sum((0, 1)).argmax())],
    "rows rolled": lambda _, states: states - states.roll(1, 0),
}


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_rows_that_do_not_look_at_each_other_are_apart(function):
    assert found(function) is None


@pytest.mark.parametrize("function", TOGETHER.values(), ids=TOGETHER)
def test_what_makes_a_row_depend_on_others_is_found(function):
    assert found(function) is not None


def test_the_place_is_that_of_the_models_own_line():
    origin = found(TOGETHER["divided by the largest of all"])
    assert origin.operation == "amax"
    assert origin.file == __file__
    assert "states / states.amax()" in str(origin)


def long_or_short(_, states, position_ids):
    factors = torch.where(position_ids.max() + 1 > 6, torch.full((WIDTH,), 2.0), torch.ones(WIDTH))
    return states * factors


def asks_length(_, states, position_ids):
    return states * 2 if position_ids.max() > 6 else states


def reads_another_weight(model, states, position_ids):
    return states * (model.layer.bias if position_ids.max() > 6 else model.layer.weight[0])


def asserts_length(_, states, position_ids):
    assert position_ids.max().item() <= TOKENS
    return states


def centred(_, states, position_ids):
    return states * (position_ids - position_ids.min()).unsqueeze(-1)


def per_token(_, states, position_ids):
    return states / position_ids.sum()


@pytest.mark.parametrize("function", [long_or_short, asks_length, asserts_length, centred])
def test_a_value_of_all_rows_that_each_row_would_have_given_changes_nothing(function):
    assert found(function, position_ids=SHORT) is None


@pytest.mark.parametrize("function", [long_or_short, asks_length, asserts_length])
def test_a_value_on_the_same_side_of_a_limit_for_every_row_changes_nothing(function):
    assert found(function, position_ids=UNEVEN) is None


@pytest.mark.parametrize("function", [long_or_short, asks_length, reads_another_weight, per_token])
def test_a_value_of_all_rows_that_one_row_alone_decides_is_found(function):
    assert found(function, position_ids=LONG) is not None


def test_a_sum_over_rows_is_found_where_all_rows_are_alike():
    assert found(per_token, position_ids=SHORT) is not None


@pytest.mark.parametrize("hides", [True, False])
def test_leaving_out_a_mask_that_hides_nothing_is_passed_over(hides):
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[-1, 4:] = 0 if hides else 1

    def shortcut(_, states, attention_mask):
        return states if attention_mask.bool().all() else states * attention_mask.unsqueeze(-1)

    assert found(shortcut, attention_mask=mask) is None


def test_how_long_the_longest_row_is_by_its_mask_is_no_such_shortcut():
    mask = (torch.arange(TOKENS) == LONG).long()

    def longest(_, states, attention_mask):
        return states * 2 if attention_mask.cumsum(1).max() > 6 else states

    assert found(longest, attention_mask=mask) is not None
