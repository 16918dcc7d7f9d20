"""A function that fills the container it is handed: the caller's is what one call would have left, or the call is not split."""

from __future__ import annotations

from collections import OrderedDict, UserDict

import numpy as np
import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

ROWS = 64


def use(rows: int) -> None:
    torch.zeros(rows, 2**18).exp()  # 2 MiB a row at the peak


def columns():
    return {"id": np.arange(ROWS), "text": [f"text {n}" for n in range(ROWS)]}


def in_parts(function, *given, **named):
    """The result of a function that does not fit whole."""
    guarded = oomguard.guard(batch=next(iter(function.__code__.co_varnames)))(function)
    with limit_memory("64 MiB"):
        result = guarded(*given, **named)
    assert [attempt.succeeded for attempt in guarded.attempts] == [False, True]
    return result


def refused(function, *given):
    guarded = oomguard.guard(batch=next(iter(function.__code__.co_varnames)))(function)
    with limit_memory("64 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        guarded(*given)
    return "".join(caught.value.__notes__)


def test_filled_and_returned_mapping_belongs_to_the_caller(subtests):
    def check(kind):
        def embed(batch):
            use(len(batch["id"]))
            batch["double"] = batch["id"] * 2
            return batch

        given = kind(columns())
        ids = given["id"]
        assert in_parts(embed, given) is given
        assert list(given) == ["id", "text", "double"]
        assert given["id"] is ids
        assert np.array_equal(given["double"], ids * 2)

    for kind in [dict, OrderedDict, UserDict]:
        with subtests.test(kind=kind):
            check(kind)


def test_a_column_that_is_added_before_the_failure_is_added_once():
    def embed(batch):
        batch["id"] = batch["id"] + 1
        use(len(batch["id"]))
        return batch

    given = columns()
    assert in_parts(embed, given) is given
    assert given["id"].tolist() == list(range(1, ROWS + 1))


def test_columns_moved_between_results_are_the_callers():
    def embed(batch):
        text = batch.pop("text")
        batch["length"] = torch.tensor([len(one) for one in text])
        use(len(text))
        return torch.as_tensor(batch["id"]) * 2

    given = columns()
    assert torch.equal(in_parts(embed, given), torch.arange(ROWS) * 2)
    assert list(given) == ["id", "length"]
    assert given["length"].shape == (ROWS,)


def test_a_list_whose_entries_are_replaced_is_the_callers_own():
    def shout(texts):
        for number, text in enumerate(texts):
            texts[number] = text + "!"
        use(len(texts))
        return texts

    given = columns()["text"]
    assert in_parts(shout, given) is given
    assert given == [f"text {n}!" for n in range(ROWS)]


def test_written_and_returned_tensor_belongs_to_the_caller():
    def doubled(x):
        use(len(x))
        x *= 2
        return x

    given = torch.arange(ROWS)
    assert in_parts(doubled, given) is given
    assert given.tolist() == list(range(0, 2 * ROWS, 2))


def test_a_table_that_gets_a_column_is_the_callers_own():
    pandas = pytest.importorskip("pandas")

    def scored(table):
        use(len(table))
        table["score"] = np.arange(len(table)) * 0 + table["id"].to_numpy()
        return table

    given = pandas.DataFrame(columns(), index=[0] * ROWS)
    assert in_parts(scored, given) is given
    assert given["score"].tolist() == list(range(ROWS))


def test_container_returned_as_is_belongs_to_the_caller():
    def same(texts):
        use(len(texts))
        return texts

    given = columns()["text"]
    assert in_parts(same, given) is given


def test_tensor_written_by_the_failed_call_is_not_rewritten():
    def doubled(x):
        x *= 2
        use(len(x))
        return x

    why = refused(doubled, torch.arange(ROWS))
    assert "the call that failed has written to the tensor in the argument x" in why


def test_list_filled_outside_the_rows_keeps_the_call_whole():
    def count(texts, seen):
        seen.append(len(texts))
        use(len(texts))
        return list(texts)

    assert "the call that failed has changed the argument seen" in refused(
        count, columns()["text"], []
    )


def test_what_belongs_to_no_row_is_not_put_into_a_container():
    def embed(batch):
        use(len(batch["id"]))
        batch["mean"] = float(batch["id"].mean())
        return batch["id"]

    given = columns()
    assert "'mean' in it does not have one entry per row" in refused(embed, given)
    assert list(given) == ["id", "text"]
