"""The counters over a whole watch: before it, at most during it, after it, and samples of the time between."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from oomguard.instrumentation.readings import Bytes
from oomguard.instrumentation.sampler import readings
from oomguard.instrumentation.samples import Samples
from oomguard.instrumentation.uses import uses_of
from oomguard.observe.resident import peak_resident_bytes
from oomguard.observe.torch_counters import Peaks
from oomguard.timeline import HOST, RESIDENT, Counter, MemoryUse

_RESIDENT: Final = Counter(HOST, RESIDENT)


class Measured:
    """What a watch measures each time that it is entered and left; before is what was before the first time."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.ended_s: float | None = None
        self.limits: Bytes = {}
        self.samples = Samples()
        self._before: Bytes = {}
        self._most: Bytes = {}
        self._after: Bytes = {}
        self._peaks: Peaks | None = None
        self._limits_asked_of: set[Counter] = {_RESIDENT}
        self._resident_before: int | None = None
        self._is_resident_exact = False

    def begin(self) -> None:
        """Begin, or go on."""
        values, now_s = readings.now(), time.monotonic()
        if self.ended_s is None:
            self._before, self.began_s = values, now_s
        self._ask_limits_of(values)
        self._resident_before = peak_resident_bytes()
        self._peaks = Peaks()
        self.take(values, now_s)

    def end(self) -> None:
        """End, so far."""
        self._after, self.ended_s = readings.now(), time.monotonic()
        self.take(self._after, self.ended_s)
        if self._peaks is not None:
            self._rise_to(self._peaks.end())
            self._peaks = None
        peak, before = peak_resident_bytes(), self._resident_before
        # The kernel keeps one peak for the whole life of the process: it is that of the watch where it rose in it.
        self._is_resident_exact = peak is not None and before is not None and peak > before
        if peak is not None and self._is_resident_exact:
            self._rise_to({_RESIDENT: peak})

    def take(self, values: Bytes, now_s: float) -> None:
        """Take what the counters showed at this moment of ``time.monotonic``."""
        self._rise_to(values)
        if self._peaks is not None:
            self._peaks.follow()
        self.samples.add(now_s - self.began_s, values)
        if not self._limits_asked_of.issuperset(values):  # once for each counter: some have none
            self._ask_limits_of(values)

    def uses(self) -> tuple[MemoryUse, ...]:
        """Return every counter's use, up to now while the watch goes on."""
        if self._peaks is not None:
            self._after = readings.now()
            self.take(self._after, time.monotonic())
            self._rise_to(self._peaks.so_far())
        found = uses_of(self._before, self._most, self._after, self.limits)
        return tuple(
            replace(use, sampled=use.sampled and not (use.what == RESIDENT and self._is_resident_exact))
            for use in found
        )

    def _ask_limits_of(self, values: Bytes) -> None:
        self.limits = self.limits | readings.limits()  # another dict: rows keep the one that was there when they ended
        self._limits_asked_of.update(values)

    def _rise_to(self, values: Bytes) -> None:
        most = self._most
        for key, value in values.items():
            if value > most.get(key, -1):
                most[key] = value
