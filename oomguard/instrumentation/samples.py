"""The samples of one watch: every one of them at first, then fewer, with what was most between two kept."""

from __future__ import annotations

from typing import Final

from oomguard.instrumentation.readings import Bytes
from oomguard.timeline import Sample

MOST_SAMPLES: Final = 8192


class Samples:
    """Samples in the order of time; twice as many seconds lie between two each time that they are too many."""

    def __init__(self, most: int = MOST_SAMPLES) -> None:
        self._most = most
        self._samples: list[Sample] = []
        self._together = 1
        self._waiting: list[Sample] = []

    def add(self, seconds: float, values: Bytes) -> None:
        """Take a sample."""
        sample = Sample(seconds, values)
        if self._together == 1:
            self._samples.append(sample)
        else:
            self._wait(sample)
        if len(self._samples) > self._most:
            self._samples = [_most(self._samples[i : i + 2]) for i in range(0, len(self._samples), 2)]
            self._together *= 2

    def _wait(self, sample: Sample) -> None:
        self._waiting.append(sample)
        if len(self._waiting) >= self._together:
            self._samples.append(_most(self._waiting))
            self._waiting.clear()

    def all(self) -> tuple[Sample, ...]:
        """Return them."""
        return tuple(sorted((*self._samples, *self._waiting), key=lambda sample: sample.seconds))


def _most(samples: list[Sample]) -> Sample:
    """Return one sample for several: at the last one's time, with the most of each counter."""
    if len(samples) == 1:
        return samples[0]
    values: Bytes = {}
    for sample in samples:
        for key, value in sample.bytes.items():
            values[key] = max(value, values.get(key, 0))
    return Sample(samples[-1].seconds, values)
