"""A number that a row's place tells is seen where it meets what the row holds; as an index of rows it changes nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from oomguard.memory.generate.follow_rows import FollowedCall, together  # noqa: E402
from oomguard.memory.generate.origin import PLACE  # noqa: E402

ROWS, TOKENS, WIDTH = 6, 8, 5
IDS = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 7


class Model(torch.nn.Module):
    """Runs a function on what a layer makes of the rows."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = torch.nn.Linear(WIDTH, WIDTH), function
        self.register_buffer("table", torch.randn(900, 1, 1))
        self.weights = torch.nn.Parameter(torch.randn(900, WIDTH))

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


def test_what_a_row_gives_by_its_place_is_seen(subtests):
    for name, function in [
        ("scales", lambda _, x, ids, mask: x * torch.arange(len(x))[:, None, None]),
        ("masked_fill", lambda _, x, ids, mask: x.masked_fill(late(x), 0)),
        ("buffer", lambda m, x, ids, mask: x + m.table[: len(x)]),
        ("result", lambda _, x, ids, mask: {"x": x, "row": torch.arange(len(x))}),
    ]:
        with subtests.test(name):
            assert what_meets(function) == PLACE
    assert what_meets(lambda _, x, ids, mask: x[torch.arange(len(x))]) is None
