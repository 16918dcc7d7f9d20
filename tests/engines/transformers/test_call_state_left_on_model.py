"""What a call leaves on its model for the next one is that of all rows, whichever parts it was made in."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.engines.transformers.call_state import join_row_state  # noqa: E402

ROWS = 6


def test_each_row_s_value_is_left_in_its_place(subtests):
    for parts in [[(0, 6)], [(0, 2), (2, 6)], [(0, 2), (2, 3), (3, 4), (4, 6)]]:
        with subtests.test(parts=parts):
            model = torch.nn.Sequential(torch.nn.Linear(2, 2))
            whole, kept = torch.arange(ROWS)[:, None], {}
            for start, stop in parts:
                with join_row_state(model, kept, start, ROWS - stop):
                    model[0].rope_deltas = whole[start:stop]
            assert model[0].rope_deltas.tolist() == whole.tolist()


def test_a_part_that_fails_is_not_among_them():
    model, kept = torch.nn.Linear(2, 2), {}
    with join_row_state(model, kept, 0, 4):
        model.rope_deltas = torch.tensor([[1], [2]])
    with pytest.raises(RuntimeError), join_row_state(model, kept, 2, 0):
        model.rope_deltas = torch.tensor([[0], [0], [0], [0]])
        raise RuntimeError("out of memory")
    with join_row_state(model, kept, 2, 0):
        model.rope_deltas = torch.tensor([[3], [4], [5], [6]])
    assert model.rope_deltas.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_a_model_that_keeps_nothing_is_left_as_it_is():
    model, kept = torch.nn.Linear(2, 2), {}
    for start in (0, 3):
        with join_row_state(model, kept, start, 3 - start):
            pass
    assert not hasattr(model, "rope_deltas")
