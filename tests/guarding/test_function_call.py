from __future__ import annotations

import io
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest

import oomguard
from oomguard.core.errors import SettingError
from oomguard.guarding.function_call import RowsCall

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402


def use(rows: int) -> None:
    torch.zeros(rows, 2**18).exp()  # 2 MiB a row at the peak


def pair(texts, labels):
    use(len(texts))
    return [(text, label) for text, label in zip(texts, labels, strict=False)]


def test_unnamed_row_argument_never_goes_whole_to_a_part():
    guarded = oomguard.guard(batch="texts")(pair)
    with limit_memory("64 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        guarded([f"text {n}" for n in range(64)], list(range(64)))
    assert 'batch=("texts", "labels")' in caught.value.__notes__[0]


def test_all_named_arguments_are_split_together():
    guarded = oomguard.guard(batch=("texts", "labels"))(pair)
    texts, labels = [f"text {n}" for n in range(64)], torch.arange(64)
    with limit_memory("64 MiB"):
        assert guarded(texts, labels) == list(zip(texts, labels, strict=True))


def test_named_arguments_of_different_lengths_are_not_split():
    guarded = oomguard.guard(batch=("texts", "labels"))(pair)
    with limit_memory("64 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        guarded(["text"] * 64, [1] * 63)
    assert "texts has 64 entries, labels 63" in caught.value.__notes__[0]


def test_a_name_among_several_that_is_no_argument_is_refused():
    with pytest.raises(SettingError, match="has no argument 'lables'"):
        oomguard.guard(batch=("texts", "lables"))(pair)


def embedded(batch):
    use(len(batch["id"]))
    return {**batch, "double": batch["id"] * 2}


def test_dict_of_columns_is_split_by_rows_and_rejoined(subtests):
    for name, texts in [
        ("list", list),
        ("tuple", tuple),
        ("array", lambda column: np.array(column, dtype=object)),
    ]:
        with subtests.test(name):
            batch = OrderedDict(
                id=np.arange(64), text=texts([f"text {n}" for n in range(64)]), vector=torch.eye(64)
            )
            with limit_memory("64 MiB"):
                whole = oomguard.guard(batch="batch")(embedded)(batch)
            assert list(batch) == ["id", "text", "vector"]
            assert list(whole) == ["id", "text", "vector", "double"]
            assert whole["double"].tolist() == list(range(0, 128, 2))
            assert list(whole["text"]) == list(batch["text"])
            assert torch.equal(whole["vector"], torch.eye(64))


def test_dict_without_equal_columns_is_not_split_with_the_reason(subtests):
    for batch, why in [
        (
            {"id": np.arange(64), "text": ["x"] * 63},
            "have different lengths: 'id' 64, 'text' 63",
        ),
        (
            {"id": np.arange(64), "temperature": 0.5},
            "'temperature' in the argument batch is not a list or a tensor",
        ),
    ]:
        with subtests.test(batch=batch, why=why):
            with limit_memory("64 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
                oomguard.guard(batch="batch")(embedded)(batch)
            assert why in caught.value.__notes__[0]


def test_of_an_empty_dict_nothing_is_split():
    assert (
        RowsCall.of(lambda rows: rows, ("rows",), ({},), {}).not_splittable
        == "the argument rows has no entries"
    )


def test_a_table_of_arrow_is_split_and_comes_back_as_one():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"id": range(64), "text": [f"text {n}" for n in range(64)]})

    def first(batch):
        use(len(batch))
        return batch

    with limit_memory("64 MiB"):
        assert oomguard.guard(batch="batch")(first)(table).equals(table)


def reason(function, *args, **kwargs):
    return RowsCall.of(function, ("rows",), args, kwargs).not_splittable


def test_what_may_hold_one_entry_a_row_prevents_a_split(subtests):
    def check(other):
        assert "other" in reason(lambda rows, other: rows, [1, 2, 3], other)
        assert "other" in reason(lambda rows, **others: rows, [1, 2, 3], other=other)
        assert "others" in reason(lambda rows, *others: rows, [1, 2, 3], other)

    for other in [
        (1, 2, 3),
        torch.zeros(3, 2),
        {"labels": [1, 2, 3]},
        iter([1, 2, 3]),
        range(3),
        io.StringIO("a\nb\nc"),
    ]:
        with subtests.test(other=other):
            check(other)


def test_what_cannot_hold_one_entry_a_row_does_not(subtests):
    def check(other):
        assert reason(lambda rows, other: rows, [1, 2, 3], other) is None

    for other in [
        "abc",
        b"abc",
        3,
        None,
        [1, 2],
        torch.zeros(2, 3),
        torch.tensor(3),
        {"a": 1, "b": 2, "c": 3},
        torch.nn.ModuleList([torch.nn.Linear(1, 1)] * 3),
    ]:
        with subtests.test(other=other):
            check(other)


def test_the_object_of_a_method_is_no_argument_of_rows():
    class Three:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return index

        def run(self, rows):
            return rows

    assert reason(Three.run, Three(), [1, 2, 3]) is None


def test_unreadable_argument_leaves_the_failure_unchanged():
    class Closed:
        def __len__(self):
            raise OSError("closed")

        __getitem__ = None

    def work(rows, other):
        use(len(rows))

    with limit_memory("8 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        oomguard.guard(batch="rows")(work)([1] * 64, Closed())
    assert "why:" in caught.value.__notes__[0]


def test_a_text_is_one_row():
    assert "not a list" in reason(lambda rows: rows, "abc")


def test_a_part_has_the_same_rows_of_all_named_arguments():
    def work(texts, labels, *, factor):
        return texts, labels, factor

    call = RowsCall.of(work, ("texts", "labels"), (["a", "b", "c"], (1, 2, 3)), {"factor": 2})
    args, kwargs = call.part(1, 3)
    assert work(*args, **kwargs) == (["b", "c"], (2, 3), 2)


def test_a_tuple_of_two_results_is_not_taken_for_two_rows():
    call = RowsCall.of(lambda rows: rows, ("rows",), ([1, 2],), {})
    assert call.problem((torch.zeros(2), torch.zeros(2, 3)), 2) is not None
    assert call.problem(("a", "b"), 2) is None


# What first goes wrong in a part is the split's doing, as far as anyone can tell: what is raised is the lack of memory.


def needs_four(rows):
    use(len(rows))
    if len(rows) < 4:
        raise ValueError("four rows are needed")
    return rows


def test_error_first_seen_in_a_part_keeps_the_first_failure():
    guarded = oomguard.guard(batch="rows")(needs_four)
    with limit_memory("32 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        guarded(list(range(32)))
    assert any("ValueError: four rows are needed" in note for note in caught.value.__notes__)


def test_a_stop_in_a_part_is_a_stop(subtests):
    def check(stop):
        def work(rows):
            use(len(rows))
            raise stop

        with limit_memory("32 MiB"), pytest.raises(stop):
            oomguard.guard(batch="rows")(work)(list(range(64)))

    for stop in [KeyboardInterrupt, SystemExit]:
        with subtests.test(stop=stop):
            check(stop)


def test_an_error_of_the_whole_call_is_raised_as_it_is(subtests):
    def check(error):
        calls = SimpleNamespace(made=0)

        def work(rows):
            calls.made += 1
            raise error

        with pytest.raises(type(error)) as caught:
            oomguard.guard(batch="rows")(work)([1, 2, 3])
        assert caught.value is error
        assert calls.made == 1
        assert not hasattr(error, "__notes__")

    for error in [
        ValueError("x"),
        StopIteration(),
        KeyError("CUDA out of memory. Tried to allocate 1.00 GiB."),
    ]:
        with subtests.test(error=error):
            check(error)


# Item: every wording of a memory failure.

WORDINGS = {
    "hip": "HIP out of memory. Tried to allocate 2.00 GiB.",
    "cpu": "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
    "xla": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
}


def test_rows_are_halved_if_a_failure_has_no_figures(subtests):
    def check(wording):
        sizes = []

        def work(rows):
            sizes.append(len(rows))
            if len(rows) > 10:
                raise RuntimeError(WORDINGS[wording])
            return rows

        assert oomguard.guard(batch="rows")(work)(list(range(64))) == list(range(64))
        assert sizes[:4] == [64, 32, 16, 8]

    for wording in list(WORDINGS):
        with subtests.test(wording=wording):
            check(wording)


def test_a_memory_error_of_the_host_is_halved_too():
    def work(rows):
        if len(rows) > 10:
            raise MemoryError(
                "Unable to allocate 7.45 GiB for an array with shape (1000, 1000, 1000) and data type float64"
            )
        return rows

    assert oomguard.guard(batch="rows")(work)(list(range(64))) == list(range(64))


def test_many_rows_come_down_to_one_within_the_attempts():
    def work(rows):
        if len(rows) > 1:
            raise RuntimeError(WORDINGS["hip"])
        return rows

    assert oomguard.guard(batch="rows")(work)(list(range(5000))) == list(range(5000))


def test_function_with_random_draws_warns_once_about_parts(caplog):
    @oomguard.guard(batch="rows")
    def noisy(rows):
        return torch.rand(len(rows), 2**18)[:, 0].tolist()

    with limit_memory("8 MiB"):
        noisy(list(range(16)))
    assert sum("draws random numbers" in record.message for record in caplog.records) == 1


def test_argument_without_entries_is_not_split_with_a_note():
    guarded = oomguard.guard(batch="texts")(lambda texts: use(64))
    with limit_memory("64 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        guarded([])
    assert "not run in parts: the argument texts has no entries" in caught.value.__notes__[-1]
