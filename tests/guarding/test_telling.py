"""A guard tells what it did: on the function, in the log, and of threads that it does not reach."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

import oomguard
from oomguard.guarding import intercept
from oomguard.guarding.function_call import RowsCall

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402

ROW = 2**18  # values of four bytes: a MiB


@oomguard.guard(batch="rows")
def work(rows):
    return [float(row) for row in torch.zeros(len(rows), ROW)[:, 0]]


@pytest.fixture
def run():
    """A guarded function that has not run yet."""
    return oomguard.guard(batch="rows")(work.__wrapped__)


def test_function_reports_its_last_call_out_of_memory(run):
    assert (run.attempts, run.diagnosis) == ((), None)
    with limit_memory("20 MiB"):
        run(list(range(64)))
        run([1])
    assert [attempt.succeeded for attempt in run.attempts] == [False, True]
    assert run.diagnosis.first_cause.kind == "cuda_oom"


def test_a_method_and_a_coroutine_tell_it_too():
    class Job:
        @oomguard.guard(batch="rows")
        def run(self, rows):
            return work.__wrapped__(rows)

    @oomguard.guard
    async def fail():
        torch.zeros(64, ROW)

    with limit_memory("20 MiB"):
        Job().run(list(range(64)))
        with pytest.raises(torch.OutOfMemoryError):
            asyncio.run(fail())
    assert len(Job().run.attempts) == 2
    assert fail.diagnosis.verdict == "oom"


def test_a_split_is_a_warning_in_the_log_once(run, caplog):
    with limit_memory("20 MiB"):
        for _ in range(3):
            run(list(range(64)))
    assert [
        record.levelname
        for record in caplog.records
        if "trying a few of the rows" in record.message
    ] == ["WARNING"]


def watched(rows):
    """Call ``work`` as an engine's method is called that is watched."""
    read = lambda _model, args, kwargs: RowsCall.of(work.__wrapped__, ("rows",), args, kwargs)  # noqa: E731
    return intercept._watched(read, work.__wrapped__, None, (rows,), {})


def test_a_thread_of_a_pool_says_once_that_no_guard_reaches_it(monkeypatch, caplog):
    monkeypatch.setattr(intercept, "_unguarded_threads", [])
    with oomguard.guard(), ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
        list(pool.map(watched, [[1], [2], [3]]))
    told = [
        record.getMessage() for record in caplog.records if "without a guard" in record.getMessage()
    ]
    assert len(told) == 1
    assert "pool" in told[0]


def test_a_guarded_thread_and_one_without_any_guard_say_nothing(subtests, monkeypatch, caplog):
    for guarded_thread in [True, False]:
        with subtests.test(guarded_thread=guarded_thread):
            monkeypatch.setattr(intercept, "_unguarded_threads", [])
            function = oomguard.guard(watched) if guarded_thread else watched
            with ThreadPoolExecutor(1) as pool:
                list(pool.map(function, [[1], [2]]))
            assert intercept.in_force == []
            assert "without a guard" not in caplog.text


NEW_WORDS = "arena grow failed: out of device memory on accelerator 0"


def test_exception_in_new_words_is_explained_without_a_retry():
    calls = []

    @oomguard.guard(batch="rows")
    def run(rows):
        calls.append(len(rows))
        raise RuntimeError(NEW_WORDS)

    with pytest.raises(RuntimeError, match="arena grow failed") as caught:
        run([1, 2, 3, 4])

    assert calls == [4]
    assert run.diagnosis.first_cause.certainty_ratio == 0.8
    assert "No signature matches its wording" in "".join(caught.value.__notes__)


def test_an_exception_of_something_else_is_left_as_it_is(subtests):
    for text in [
        "expected 4 rows, got 3",
        "no available port in 8000-8010",
        "file too large for the archive",
    ]:
        with subtests.test(text=text):
            with pytest.raises(RuntimeError) as caught, oomguard.guard() as guard:
                raise RuntimeError(text)

            assert guard.diagnosis is None
            assert not hasattr(caught.value, "__notes__")
