"""Read the counters in one thread for all open watches; it ends with the last watch."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

from oomguard.core.measurements import (
    ALLOCATED,
    HOST,
    RESERVED,
    RESIDENT,
    Counter,
    MemoryUse,
    Sample,
)
from oomguard.instrumentation.readings import Bytes, Readings
from oomguard.probe.host import peak_resident_bytes
from oomguard.probe.torch_memory import Peaks

# The samples of one watch: all at first, then fewer, each with the peak of its interval.

MOST_SAMPLES: Final = 8192


class Samples:
    """Hold samples in order of time; whenever they are too many, the interval doubles."""

    def __init__(self, most: int = MOST_SAMPLES) -> None:
        self._most = most
        self._samples: list[Sample] = []
        self._together = 1
        self._waiting: list[Sample] = []

    def add(self, seconds: float, values: Bytes) -> None:
        """Add a sample."""
        sample = Sample(seconds, values)
        if self._together == 1:
            self._samples.append(sample)
        else:
            self._wait(sample)
        if len(self._samples) > self._most:
            self._samples = [
                _most(self._samples[i : i + 2]) for i in range(0, len(self._samples), 2)
            ]
            self._together *= 2

    def _wait(self, sample: Sample) -> None:
        self._waiting.append(sample)
        if len(self._waiting) >= self._together:
            self._samples.append(_most(self._waiting))
            self._waiting.clear()

    def all(self) -> tuple[Sample, ...]:
        """Return all samples."""
        return tuple(sorted((*self._samples, *self._waiting), key=lambda sample: sample.seconds))


def _most(samples: list[Sample]) -> Sample:
    """Merge samples into one, with the last one's time and the peak of each counter."""
    if len(samples) == 1:
        return samples[0]
    values: Bytes = {}
    for sample in samples:
        for key, value in sample.bytes.items():
            values[key] = max(value, values.get(key, 0))
    return Sample(samples[-1].seconds, values)


def most(*sizes: int | None) -> int | None:
    """Return the largest known size, or None if none is known."""
    return max((size for size in sizes if size is not None), default=None)


def uses_of(
    before: Mapping[Counter, int],
    peaks: Mapping[Counter, int],
    after: Mapping[Counter, int],
    limits: Mapping[Counter, int],
) -> tuple[MemoryUse, ...]:
    """Return every counter's use: before, peak and after. Only torch's peak is exact."""
    return tuple(
        MemoryUse(
            key.device,
            key.what,
            before.get(key),
            most(before.get(key), peaks.get(key), after.get(key)),
            after.get(key),
            limits.get(key),
            sampled=key.what not in {ALLOCATED, RESERVED},
        )
        for key in dict.fromkeys([*before, *peaks, *after])
    )


readings: Final = Readings()
_STAYS_S: Final = 1.0
_LONGEST_WAIT_S: Final = 3600.0  # a lock accepts no longer timeout than threading.TIMEOUT_MAX


class SampleReceiver(Protocol):
    """Define an object that receives samples."""

    sample_every_s: float

    def sample(self, now_s: float, values: Bytes) -> None:
        """Take the values of the counters at a time of ``time.monotonic``."""

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where no thread would ever release it."""


class _Sampler:
    """Run the sampling thread; ``readings`` is open while there is any receiver."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all receivers in a forked child, where the thread does not exist."""
        self._lock = threading.Lock()
        self._due: dict[SampleReceiver, float] = {}
        self._thread: threading.Thread | None = None
        # The thread waits for this lock, which is locked while there is no news. Each thread has
        # its own.
        self._news = threading.Lock()
        self._waits_until_s = 0.0

    def everyone(self) -> tuple[SampleReceiver, ...]:
        """Return all receivers."""
        return tuple(self._due)

    def add(self, sampled: SampleReceiver) -> None:
        """Add a receiver; start the thread for the first one."""
        with self._lock:
            self._due[sampled] = due_s = time.monotonic() + sampled.sample_every_s
            if self._thread is None:
                readings.begin()
                self._news = threading.Lock()
                self._news.acquire()
                self._thread = threading.Thread(
                    target=self._run, args=(self._news,), name="oomguard-watch", daemon=True
                )
                self._thread.start()
            elif due_s < self._waits_until_s:
                self._wake()

    def remove(self, sampled: SampleReceiver, *, stays: bool = False) -> threading.Thread | None:
        """Remove a receiver.

        With the last one, return the thread, which ends now, or a moment later if it ``stays``.
        """
        with self._lock:
            self._due.pop(sampled, None)
            if self._due or stays or self._thread is None:
                return None
            thread = self._thread
            self._close()
            self._wake()
        return thread

    def _wake(self) -> None:
        """Wake the thread. The caller must hold the lock."""
        if self._news.locked():
            self._news.release()

    def _close(self) -> None:
        self._thread = None
        readings.end()

    def _run(self, news: threading.Lock) -> None:
        me = threading.current_thread()
        wait_s = 0.0
        is_last_wait = False
        while True:
            # Use a plain lock, because a condition creates one at each wait. The thread must wake
            # up as rarely and briefly as possible.
            is_told = news.acquire(timeout=wait_s)
            values: Bytes = {}
            with self._lock:
                if self._thread is not me:
                    return
                if is_last_wait and not is_told and not self._due:
                    self._close()
                    return
                now_s = time.monotonic()
                due = [sampled for sampled, at_s in self._due.items() if at_s <= now_s]
                for sampled in due:
                    self._due[sampled] = now_s + sampled.sample_every_s
                if due:
                    with contextlib.suppress(Exception):
                        # A lost device costs this sample, not the user's work.
                        values = readings.now()
                is_last_wait = not self._due
                self._waits_until_s = min(self._due.values(), default=now_s + _STAYS_S)
                wait_s = min(max(0.0, self._waits_until_s - now_s), _LONGEST_WAIT_S)
            for sampled in due:
                with contextlib.suppress(Exception):
                    sampled.sample(now_s, values)


sampler = _Sampler()


def _renew() -> None:
    """Reset the thread and all locks in a forked child."""
    for sampled in sampler.everyone():
        sampled.renew_lock()
    readings.forget_files()
    sampler.begin_anew()


os.register_at_fork(after_in_child=_renew)


# The counters over a whole watch: before it, at the peak, after it, and samples in between.

_RESIDENT: Final = Counter(HOST, RESIDENT)


class WatchMeasurement:
    """Measure a watch over all its entries; "before" is before the first entry."""

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
        """Begin or continue."""
        values = readings.now()
        now_s = time.monotonic()
        if self.ended_s is None:
            self._before = values
            self.began_s = now_s
        self._ask_limits_of(values)
        self._resident_before = peak_resident_bytes()
        self._peaks = Peaks()
        self.take(values, now_s)

    def end(self) -> None:
        """End for now."""
        self._after = readings.now()
        self.ended_s = time.monotonic()
        self.take(self._after, self.ended_s)
        if self._peaks is not None:
            self._rise_to(self._peaks.end())
            self._peaks = None
        peak = peak_resident_bytes()
        before = self._resident_before
        # The kernel keeps one peak for the whole process. It is the watch's peak if it rose during
        # the watch.
        self._is_resident_exact = peak is not None and before is not None and peak > before
        if peak is not None and self._is_resident_exact:
            self._rise_to({_RESIDENT: peak})

    def take(self, values: Bytes, now_s: float) -> None:
        """Take the values of the counters at a time of ``time.monotonic``."""
        self._rise_to(values)
        if self._peaks is not None:
            self._peaks.follow()
        self.samples.add(now_s - self.began_s, values)
        # once for each counter, because some have no value
        if not self._limits_asked_of.issuperset(values):
            self._ask_limits_of(values)

    def uses(self) -> tuple[MemoryUse, ...]:
        """Return every counter's use, up to now if the watch is active."""
        if self._peaks is not None:
            self._after = readings.now()
            self.take(self._after, time.monotonic())
            self._rise_to(self._peaks.so_far())
        found = uses_of(self._before, self._most, self._after, self.limits)
        return tuple(
            replace(
                use, sampled=use.sampled and not (use.what == RESIDENT and self._is_resident_exact)
            )
            for use in found
        )

    def _ask_limits_of(self, values: Bytes) -> None:
        # Make a new dictionary: finished rows keep the old one.
        self.limits = self.limits | readings.limits()
        self._limits_asked_of.update(values)

    def _rise_to(self, values: Bytes) -> None:
        most = self._most
        for key, value in values.items():
            if value > most.get(key, -1):
                most[key] = value
