"""The samples of one watch: a long night keeps few of them, and every peak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.measurements import Counter
from oomguard.instrumentation import MOST_SAMPLES, Samples

HOST = Counter("host", "resident")


def test_long_run_keeps_bounded_samples_and_every_peak():
    samples = Samples()
    for i in range(40_000):
        samples.add(float(i), {HOST: 10**6 if i in {7, 33_333} else i})
    kept = samples.all()

    assert MOST_SAMPLES / 2 <= len(kept) <= MOST_SAMPLES + 64
    assert sum(sample.bytes[HOST] == 10**6 for sample in kept) == 2
    assert [sample.seconds for sample in kept] == sorted(sample.seconds for sample in kept)
    assert kept[-1].seconds == 39_999.0


@given(values=st.lists(st.integers(0, 2**40), min_size=1, max_size=200), most=st.integers(2, 16))
def test_thinned_samples_keep_peak_end_and_order(values, most):
    samples = Samples(most=most)
    for i, value in enumerate(values):
        samples.add(float(i), {HOST: value})
    kept = samples.all()

    assert max(sample.bytes[HOST] for sample in kept) == max(values)
    assert kept[-1].seconds == len(values) - 1
    assert [sample.seconds for sample in kept] == sorted({sample.seconds for sample in kept})
    assert len(kept) <= most + max(2, 2 * len(values) // most)
