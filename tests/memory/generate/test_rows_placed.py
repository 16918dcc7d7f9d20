"""A number that a row's place tells is seen where it meets what the row holds; as an index of rows it changes nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from oomguard.memory.generate.follow_rows import FollowedCall, together  # noqa: E402
from oomguard.memory.generate.origin import NUMBER, PLACE, TAKEN  # noqa: E402

ROWS, TOKENS, WIDTH = 6, 8, 5
IDS = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 7


class Model(torch.nn.Module):
    """Runs a function on what a layer makes of the rows."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = torch.nn.Linear(WIDTH, WIDTH), function
        self.register_buffer("table", torch.randn(900, 1, 1))
        self.weights = torch.nn.Parameter(torch.randn(900, WIDTH))
        self.of_six = torch.nn.ModuleDict({"of 6": torch.nn.Linear(WIDTH, WIDTH)})

    def forward(self, states, ids, mask):
        return self.function(self, self.layer(states), ids, mask)


def what_meets(function, rows=ROWS):
    """Return what makes the rows of a call of ``function`` depend on each other; None where nothing does."""
    given = {
        "states": torch.randn(rows, TOKENS, WIDTH),
        "ids": IDS.repeat(rows // ROWS, 1),
        "mask": torch.ones(rows, TOKENS, dtype=torch.long),
    }
    call = FollowedCall(
        Model(function).eval(),
        lambda change: {name: change(value) for name, value in given.items()},
        rows,
        lambda model, arguments: model(**arguments),
        mask_is_full=False,
        is_library=lambda name: name.partition(".")[0] in ("torch", "transformers"),
    )
    return getattr(together(call).origin, "operation", None)


def late(x):
    return (torch.arange(len(x)) >= 4)[:, None, None]


def chosen_late(_, x, ids, mask):
    y = x.clone()
    y[torch.arange(len(x)) >= 4] *= 2
    return y


def places_found(_, x, ids, mask):
    y, found = x.clone(), (torch.arange(len(x)) >= 4).nonzero().squeeze(-1)
    y[found] = y[found] * 2
    return y


def a_late_entry(model, x, ids, mask):
    table = model.table.clone()
    table[:4] = 0
    return x + table[: len(x)]


def takes_another_row(_, x, ids, mask):
    order = torch.arange(len(x))
    order[4:] = 0
    return x[order] + x


def tokens_by_place(model, x, ids, mask):
    return x + torch.nn.functional.embedding(ids + torch.arange(len(x))[:, None], model.weights)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda _, x, ids, mask: x * torch.arange(len(x))[:, None, None], id="scales"),
        pytest.param(lambda _, x, ids, mask: torch.where(late(x), -x, x), id="where"),
        pytest.param(lambda _, x, ids, mask: x.masked_fill(late(x), 0), id="masked_fill"),
        pytest.param(lambda _, x, ids, mask: x + torch.linspace(0, 1, len(x))[:, None, None], id="linspace"),
        pytest.param(lambda _, x, ids, mask: torch.einsum("ab,btd->atd", torch.eye(len(x)), x), id="eye"),
        pytest.param(lambda m, x, ids, mask: x + m.table[: len(x)], id="buffer"),
        pytest.param(lambda m, x, ids, mask: x + m.weights[: len(x), None], id="parameter"),
        pytest.param(lambda m, x, ids, mask: x + m.weights[torch.arange(len(x))][:, None], id="looked_up"),
        pytest.param(lambda _, x, ids, mask: {"x": x, "row": torch.arange(len(x))}, id="result"),
        pytest.param(lambda _, x, ids, mask: torch.cat([x, late(x).float().expand(-1, -1, WIDTH)], 1), id="beside"),
        chosen_late,
        places_found,
        a_late_entry,
        takes_another_row,
        tokens_by_place,
    ],
)
def test_what_a_row_gives_by_its_place_is_seen(function):
    assert what_meets(function) == PLACE


def test_a_place_beyond_the_rows_that_are_followed_decides_too():
    assert (
        what_meets(lambda _, x, ids, mask: torch.where((torch.arange(len(x)) >= 500)[:, None, None], -x, x), 600)
        == PLACE
    )


def written(*index, value=0):
    """Return what writes to some rows of a copy."""

    def function(_, x, ids, mask):
        y = x.clone()
        for each in index:
            y[each] = value
        return y

    return function


def adds_to_the_late(_, x, ids, mask):
    y = x.clone()
    y[4:] += 1
    return y


def doubles_in_a_view(_, x, ids, mask):
    y = x.clone()
    y.narrow(0, len(x) - 3, 3)[:, 0].mul_(2)
    return y


def marks_in_a_mask(_, x, ids, mask):
    kept = mask.clone()
    kept[4:, 3:] = 0
    return x * kept[..., None]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(written(-1), id="last"),
        pytest.param(written(0), id="first"),
        pytest.param(written(slice(2, 4)), id="slice"),
        pytest.param(written(slice(3, None, 4)), id="every_fourth"),
        pytest.param(written([0, 3]), id="list"),
        pytest.param(lambda _, x, ids, mask: x.index_fill(0, torch.tensor([len(x) - 1]), 0.0), id="index_fill"),
        adds_to_the_late,
        doubles_in_a_view,
        marks_in_a_mask,
    ],
)
def test_a_row_that_is_named_by_number_and_written_to_is_seen(function):
    assert what_meets(function) == PLACE


def test_a_row_named_by_a_number_beyond_those_that_are_followed_is_seen_where_the_call_has_it():
    assert what_meets(written(slice(500, None)), 600) == PLACE
    assert what_meets(written(slice(None, 500)), 600) == NUMBER  # torch leaves out a slice of all rows
    assert what_meets(lambda _, x, ids, mask: x[:700], 600) is None


def each_is_written(_, x, ids, mask):
    y = torch.zeros_like(x)
    for row in range(len(x)):
        y[row] = x[row].tanh()
    return y


def some_at_a_time(_, x, ids, mask):
    y = x.clone()
    for row in range(0, len(x), 4):
        y[row : row + 4] *= 2
    return y


def in_their_views(_, x, ids, mask):
    y = x.clone()
    for row in y:
        row.mul_(2)
    y[: len(x)] += 1
    return y


def shifted_tokens(_, x, ids, mask):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y[:, 0] = 1
    return y


def first_of_beams(_, x, ids, mask):
    scores = x.new_zeros(3 * len(x))
    scores[::3] = 1
    return x * scores.view(len(x), 3)[:, :1, None]


@pytest.mark.parametrize("function", [each_is_written, some_at_a_time, in_their_views, shifted_tokens, first_of_beams])
def test_what_writes_to_each_row_names_none(function):
    assert what_meets(function) is None


def last_of_each(_, x, ids, mask):
    return x[torch.arange(len(x)), mask.sum(1) - 1]


def put_back_by_place(_, x, ids, mask):
    y = torch.zeros_like(x)
    y[torch.arange(len(x))] = x.tanh()
    return y


def beams(_, x, ids, mask):
    flat = torch.cat([x, x + 1], 1).reshape(2 * len(x), TOKENS, WIDTH)
    picked = (torch.arange(len(x)) * 2)[:, None] + (ids[:, :2] % 2)
    return flat.index_select(0, picked.view(-1)).view(len(x), 2, TOKENS, WIDTH)


def tokens_of_all_rows(_, x, ids, mask):
    found = mask.flatten().nonzero().squeeze(-1)
    return torch.zeros_like(x).flatten(0, 1).index_copy(0, found, x.flatten(0, 1)[found].tanh()).view_as(x)


def groups_of_each(_, x, ids, mask):
    groups = torch.full((len(x), TOKENS), -1)
    groups[:, : int(torch.empty(3).shape[0])] = torch.empty(3, dtype=torch.long)  # of what nothing is known
    return x + groups[torch.arange(len(x))[:, None], torch.arange(TOKENS)][..., None]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(
            lambda _, x, ids, mask: x * torch.ones(len(x), 1, 1) + torch.zeros(len(x))[:, None, None], id="alike"
        ),
        pytest.param(lambda _, x, ids, mask: x + torch.arange(TOKENS).expand(len(x), -1)[..., None], id="tokens"),
        pytest.param(
            lambda _, x, ids, mask: x + (torch.arange(len(x) * TOKENS) % TOKENS).view(-1, TOKENS, 1), id="tokens_of_all"
        ),
        pytest.param(lambda m, x, ids, mask: x + m.weights[:1].repeat(len(x), 1)[:, None], id="one_for_all"),
        pytest.param(
            lambda _, x, ids, mask: x.gather(0, torch.arange(len(x))[:, None, None].expand_as(x)), id="gather"
        ),
        pytest.param(lambda m, x, ids, mask: x + m.weights[ids], id="embedding"),
        last_of_each,
        put_back_by_place,
        groups_of_each,
        beams,
        tokens_of_all_rows,
    ],
)
def test_an_index_of_rows_and_what_is_the_same_for_each_row_change_nothing(function):
    assert what_meets(function) is None


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for i in range(x.shape[0]):
        y[i] = -x[i] if i >= 4 else x[i]
    return y


def goes_over_rows(_, x, ids, mask):
    return torch.stack([-row if place >= 4 else row for place, row in enumerate(x)])


def writes_rows(_, x, ids, mask):
    y = torch.zeros_like(x)
    for place in range(len(x)):
        y[place] = x[place] if place < 4 else x[place] * 2
    return y


def by_a_name(model, x, ids, mask):
    name = f"of {len(x)}"
    layer = model.of_six[name] if len({name} & set(model.of_six)) else model.layer
    return layer(x)


def in_groups_where_it_can(_, x, ids, mask):
    try:
        return x.view(3, 2, TOKENS, WIDTH).flip(2).view_as(x)
    except RuntimeError:
        return x


@pytest.mark.parametrize(
    "function",
    [
        by_a_name,
        in_groups_where_it_can,
        pytest.param(lambda _, x, ids, mask: x * {6: 2.0}.get(len(x), 1.0), id="looked_up"),
        pytest.param(lambda _, x, ids, mask: x * (1 + (tuple(x.shape)[:1] == (6,))), id="as_a_number"),
        goes_over_rows,
        writes_rows,
        pytest.param(lambda _, x, ids, mask: scripted(x), id="script"),
        pytest.param(lambda _, x, ids, mask: eval("x * (2 if len(x) > 5 else 1)"), id="eval"),
        pytest.param(lambda _, x, ids, mask: x / len(x), id="by_rows"),
    ],
)
def test_own_code_that_does_something_else_with_fewer_rows_is_seen(function):
    assert what_meets(function) == NUMBER


def each_row(_, x, ids, mask):
    return torch.stack([row.tanh() * 2 for row in x])


def own_lengths(_, x, ids, mask):
    return torch.stack([row[:n].sum(0) / n for row, n in zip(x, mask.sum(1).tolist(), strict=True)])


def own_counts(_, x, ids, mask):
    return torch.stack([row[:n].sum(0) for row, n in zip(x, (ids != 99).sum(1).tolist(), strict=True)])


def distances(model, x, ids, mask):
    return torch.cdist(x[:, 0], model.weights[:4])


def by_names_of_layers(model, x, ids, mask):
    for name in (f"of {number}" for number in (6, 6)):
        x = model.of_six[name](x)
    return x


@pytest.mark.parametrize("function", [each_row, own_lengths, own_counts, distances, by_names_of_layers])
def test_own_code_that_does_the_same_with_each_row_is_none_of_it(function):
    assert what_meets(function) is None


def equal_to_the_one_before(_, x, ids, mask):
    keys, order = ids[:, 0].sort()
    again = torch.cat([torch.zeros(1, dtype=torch.bool), keys[1:] == keys[:-1]])
    y = x.clone()
    y[order[again]] = 0
    return y


def test_rows_that_are_held_against_those_before_them_are_seen():
    assert what_meets(equal_to_the_one_before) is not None


def counts_alike(_, x, ids, mask):
    rows = [tuple(row) for row in ids.tolist()]
    return x * torch.tensor([float(rows.count(row)) for row in rows])[:, None, None]


def test_values_of_single_rows_that_own_code_is_told_are_not_followed_further():
    assert what_meets(counts_alike) == TAKEN
