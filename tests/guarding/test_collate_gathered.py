"""Results of parts stand in their place as they come, on the host where the device has no room, and in the exception in the end."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType

import pytest

import oomguard
from oomguard.guarding.collate import OutputCollector

np = pytest.importorskip("numpy", reason="numpy is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

ROW = 2**18  # values of four bytes: a MiB


def gathered(*parts, pad_value=None):
    """Return what parts become, each of them a value with one entry a row."""
    all_rows = OutputCollector(sum(len(part) for part in parts), pad_value)
    assert [all_rows.add(part, len(part)) for part in parts] == [None] * len(parts)
    return all_rows.result()


def test_results_are_never_there_twice():
    @oomguard.guard(batch="rows")
    def work(rows):
        return torch.zeros(len(rows), ROW).exp()  # 2 MiB a row at the peak, one of them stays

    with limit_memory("100 MiB"):
        assert work(list(range(64))).shape == (64, ROW)


def test_results_without_room_for_the_next_part_move_to_the_host():
    def work(rows):
        torch.zeros(len(rows), 24 * ROW)  # 24 MiB a row that go again
        return torch.ones(len(rows), ROW)

    with limit_memory("44 MiB"):
        result = oomguard.guard(batch="rows")(work)(list(range(40)))
    assert result.shape == (40, ROW)
    assert bool((result == 1).all())


def failing_late(rows):
    """Run out of memory in the last rows whatever their number, when 56 of 64 are done."""
    torch.zeros(len(rows), ROW)
    if rows[-1] >= 56:
        torch.empty(1, 2**30)
    return [row * 10 for row in rows]


def test_finished_rows_are_in_the_exception_and_survive_pickling():
    with limit_memory("9 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        oomguard.guard(batch="rows")(failing_late)(list(range(64)))
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert error.partial.rows == 64
        assert len(error.partial) == 56
        assert error.partial.result == [row * 10 for row in range(56)]
    assert any("56 of 64 rows are done" in note for note in caught.value.__notes__)


def test_finished_rows_of_a_tensor_hold_no_more_than_they_are():
    def work(rows):
        failing_late(rows)
        return torch.tensor(rows)

    with limit_memory("9 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        oomguard.guard(batch="rows")(work)(list(range(64)))
    result = caught.value.partial.result
    assert result.tolist() == list(range(56))
    assert result.untyped_storage().nbytes() == result.nbytes


def test_exception_has_all_rows_if_their_result_has_no_room():
    def work(rows):
        return list(torch.zeros(len(rows), ROW).exp())

    with limit_memory("20 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        oomguard.guard(batch="rows")(work)(list(range(64)))
    assert caught.value.partial.done == 64
    assert [row.shape for row in caught.value.partial.result] == [(ROW,)] * 64


def test_an_exception_whose_rows_cannot_be_pickled_can_be():
    def work(rows):
        failing_late(rows)
        return [lambda: None for _ in rows]

    with limit_memory("9 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        oomguard.guard(batch="rows")(work)(list(range(64)))
    assert len(caught.value.partial) == 56
    assert len(pickle.loads(pickle.dumps(caught.value)).partial) == 0


def test_a_stop_in_a_part_leaves_the_finished_rows_in_the_guard():
    from oomguard.guarding.function_call import RowsCall
    from oomguard.guarding.micro_batch import MicroBatchRun

    def work(rows):
        torch.zeros(len(rows), ROW)
        if rows[-1] >= 56:
            raise KeyboardInterrupt
        return rows

    g = oomguard.guard()
    with limit_memory("9 MiB"), pytest.raises(KeyboardInterrupt):
        MicroBatchRun(g._state, work, RowsCall.of(work, ("rows",), (list(range(64)),), {})).run()
    assert g.partial.result == list(range(len(g.partial)))
    assert 0 < len(g.partial) < 64


def test_views_let_go_of_what_they_are_cut_from():
    logits = torch.zeros(4, 100, 8)
    rows = gathered([logits[0, -1], logits[1, -1]], [{"last": logits[2, -1]}, (logits[3, -1], 3)])
    tensors = [rows[0], rows[1], rows[2]["last"], rows[3][0]]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [32] * 4
    assert rows[3][1] == 3


def test_rows_of_one_tensor_that_are_all_kept_are_not_copied():
    tensor = torch.zeros(4, 8)
    assert gathered(list(tensor))[0].data_ptr() == tensor.data_ptr()


def test_a_result_keeps_its_type(subtests):
    for name, parts, whole in [
        ("list", [[1, 2], [3]], [1, 2, 3]),
        ("tuple", [(1, 2), (3,)], (1, 2, 3)),
        ("tensor", [torch.tensor([[1], [2]]), torch.tensor([[3]])], torch.tensor([[1], [2], [3]])),
        ("array", [np.array([1, 2]), np.array([3])], np.array([1, 2, 3])),
        (
            "masked",
            [np.ma.array([1, 2], mask=[0, 1]), np.ma.array([3])],
            np.ma.array([1, 2, 3], mask=[0, 1, 0]),
        ),
    ]:
        with subtests.test(name):
            result = gathered(*parts)
            assert type(result) is type(whole)
            assert repr(result) == repr(whole)


def test_rows_that_ended_earlier_are_filled_as_in_one_batch():
    one, two, three = torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]]), torch.tensor([[6]])
    assert gathered(one, two, three, pad_value=9).tolist() == [[1, 2, 9], [3, 4, 5], [6, 9, 9]]


def test_parts_of_different_shapes_or_types_are_told():
    rows = OutputCollector(4)
    assert rows.add(torch.zeros(2, 3), 2) is None
    assert "different shapes" in rows.add(torch.zeros(2, 4), 2)
    assert "different types" in rows.add(torch.zeros(2, 3, dtype=torch.float64), 2)
    assert rows.done == 2


class Table:
    """A table as pandas has it, as far as rows go."""

    def __init__(self, rows, index=None):
        self.rows, self.index = list(rows), list(range(len(rows))) if index is None else index
        self.shape = (len(self.rows), 1)
        self.iloc = self

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, cut):
        return Table(self.rows[cut], self.index[cut])


@pytest.fixture
def tables(monkeypatch):
    def concat(parts, ignore_index=False):
        rows = [row for part in parts for row in part.rows]
        return Table(
            rows, None if ignore_index else [label for part in parts for label in part.index]
        )

    library = ModuleType("pandas")
    library.concat = concat
    monkeypatch.setitem(sys.modules, "pandas", library)
    monkeypatch.setattr(Table, "__module__", "pandas.core.frame")


def test_a_table_comes_back_as_a_table_with_its_own_labels(subtests, tables):
    def check(index):
        @oomguard.guard(batch="table")
        def work(table):
            torch.zeros(len(table), ROW)
            return Table([row * 2 for row in table.rows], None if index is None else table.index)

        with limit_memory("9 MiB"):
            result = work(Table(range(64), index))
        assert type(result) is Table
        assert result.rows == [row * 2 for row in range(64)]
        assert result.index == (index or list(range(64)))

    for index in [None, list(range(100, 164))]:
        with subtests.test(index=index):
            check(index)
