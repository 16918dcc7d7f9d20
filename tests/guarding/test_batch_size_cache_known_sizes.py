"""A later call begins with the rows that are known to fit, and with more where there is room."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

import oomguard
from oomguard.guarding.batch_size_cache import BatchSizeCache

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

ROW = 2**18  # values of four bytes: a MiB


class Work:
    """A guarded function of a row's MiB, and the rows of each call of it."""

    def __init__(self, **options):
        self.sizes: list[int] = []
        self.failures = 0
        self.run = oomguard.guard(batch="rows", **options)(self.work)

    def work(self, rows):
        self.sizes.append(len(rows))
        try:
            torch.zeros(len(rows), ROW)
        except torch.OutOfMemoryError:
            self.failures += 1
            raise
        return [row + 1 for row in rows]


def test_equal_calls_run_out_of_memory_once():
    work = Work()
    with limit_memory("20 MiB"):
        for _ in range(8):
            assert work.run(list(range(64))) == list(range(1, 65))
    assert work.failures == 1


def test_a_call_of_few_rows_is_made_as_it_is():
    work = Work()
    with limit_memory("20 MiB"):
        work.run(list(range(64)))
        work.sizes.clear()
        work.run(list(range(10)))
    assert work.sizes == [10]


def test_the_size_grows_again_when_there_is_room():
    work = Work()
    with limit_memory("20 MiB") as device:
        work.run(list(range(64)))
        device.capacity_bytes *= 8
        work.sizes.clear()
        work.run(list(range(64)))
    assert work.sizes == [64]


def test_less_room_than_before_begins_with_fewer_rows():
    work = Work()
    with limit_memory("40 MiB"):
        work.run(list(range(64)))
        held = torch.zeros(20, ROW)
        work.run(list(range(64)))
    assert work.failures == 1
    assert held.shape[0] == 20


def test_more_rows_are_tried_again_ever_later():
    sizes, most = [], [16]

    @oomguard.guard(batch="rows")
    def work(rows):
        sizes.append(len(rows))
        if len(rows) > most[0]:
            raise RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB.")
        return rows

    for _ in range(40):
        assert work(list(range(64))) == list(range(64))
    assert 2 <= sum(size > 16 for size in sizes) <= 5
    most[0] = 64
    for _ in range(80):
        work(list(range(64)))
    assert sizes[-1] == 64


def test_what_a_part_of_a_known_size_raises_is_the_functions_own():
    work = Work()
    with limit_memory("20 MiB"):
        work.run(list(range(64)))
        work.sizes.clear()
        with pytest.raises(TypeError) as caught:
            work.run([None, *range(63)])
    assert len(work.sizes) == 1
    assert not hasattr(caught.value, "__notes__")


def test_last_inseparable_rows_are_judged_by_the_whole_call():
    least, most = 4, 16

    @oomguard.guard(batch="rows")
    def work(rows):
        if len(rows) > most:
            raise RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB.")
        if len(rows) < least:
            raise ValueError("four rows are needed")
        return rows

    assert work(list(range(64))) == list(range(64))
    with pytest.raises(RuntimeError, match="HIP out of memory") as caught:
        work(list(range(66)))
    assert any("four rows are needed" in note for note in caught.value.__notes__)


def test_pinned_rows_are_never_split_by_what_was_learned():
    work = Work(pin=["batch_size"])
    for _ in range(2):
        with limit_memory("20 MiB"), pytest.raises(torch.OutOfMemoryError):
            work.run(list(range(64)))
    assert work.sizes == [64, 64]


class Call:
    model, not_splittable = None, None

    def __init__(self, rows, prompt_tokens=None, max_new_tokens=None):
        self.rows, self.prompt_tokens, self.max_new_tokens = rows, prompt_tokens, max_new_tokens


def test_longer_rows_begin_with_fewer_and_shorter_ones_with_more(subtests):
    for prompt, free, rows in [
        (90, None, 16),
        (40, None, 32),
        (190, None, 4),
        (90, 800, 7),
        (90, 100_000, 64),
        (40, 800, 15),
    ]:
        with subtests.test(prompt=prompt, free=free, rows=rows):
            known = BatchSizeCache()
            known.ran(Call(64, 90, 10), 16, 100.0, after_failure=True, varied={})
            assert known.begin(Call(64, prompt, 10), free) == rows


def test_nothing_is_known_of_another_model_at_the_same_place():
    class Model:
        pass

    model, known = Model(), BatchSizeCache()
    call = Call(64)
    call.model = model
    known.ran(call, 16, None, after_failure=True, varied={})
    assert known.begin(call, None) == 16
    known._by_call[next(iter(known._by_call))].model = weakref.ref(Model())
    assert known.begin(call, None) == 64


# Nothing of a handled failure is kept.


def test_handled_failure_frees_all_memory():
    guarded = Work().run
    gc.collect()
    gc.disable()
    try:
        with limit_memory("20 MiB") as device:
            rows = torch.arange(64)
            before = device.live_bytes
            result = guarded(rows)
            assert len(result) == 64
            del result
            assert device.live_bytes == before
            kept = weakref.ref(rows)
            del rows
            assert kept() is None
    finally:
        gc.enable()


def test_a_failure_that_is_raised_keeps_no_input_once_it_is_gone():
    guarded = Work().run
    gc.collect()
    gc.disable()
    try:
        with limit_memory("0.5 MiB"):
            rows = torch.arange(64)
            kept = weakref.ref(rows)
            with contextlib.suppress(torch.OutOfMemoryError):
                guarded(rows)
            del rows
            assert kept() is None
    finally:
        gc.enable()
