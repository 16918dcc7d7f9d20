"""The rows of one watch: made when somebody asks, and beyond a number added up."""

from __future__ import annotations

from oomguard.core.measurements import Counter, MemoryUse
from oomguard.instrumentation import MOST_ROWS, EndedCall, Rows

HOST, CUDA = Counter("host", "resident"), Counter("cuda:0", "allocated")


def ended(began_s, before=(), peaks=(), after=(), error=""):
    sizes = dict(before), dict(peaks), dict(after), {}
    return EndedCall("forward", "call", began_s, 0.5, "", (2, None, None), *sizes, (), error)


def test_rows_are_the_same_whenever_they_are_asked_for():
    once, often = Rows(), Rows()
    for i in range(150):
        for rows in (once, often):
            rows.add(ended(float(i), {HOST: i}, {HOST: 2 * i}, {HOST: i + 1}))
        assert len(often.all()) == i + 1
    assert once.all() == often.all()
    assert once.all()[7].uses == (MemoryUse("host", "resident", 7, 14, 8, sampled=True),)


def test_calls_beyond_a_limit_are_summed_except_failed_ones():
    rows = Rows()
    for i in range(MOST_ROWS + 5):
        rows.add(ended(float(i), {CUDA: 10}, {CUDA: 100 + i}, {CUDA: i}))
    rows.add(ended(1e6, error="OutOfMemoryError"))
    kept = rows.all()
    last = kept[-1]

    assert len(kept) == MOST_ROWS + 2
    assert (last.calls, last.seconds, last.rows) == (5, 2.5, 10)
    assert (last.use.before_bytes, last.use.peak_bytes, last.use.after_bytes) == (
        10,
        MOST_ROWS + 104,
        MOST_ROWS + 4,
    )
    assert kept[-2].error == "OutOfMemoryError"
