"""One thread that reads the counters for every watch that is open, as often as each asks; it ends with the last of them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Final, Protocol

from oomguard.instrumentation.readings import Bytes, Readings

readings: Final = Readings()
_STAYS_S: Final = 1.0
_LONGEST_WAIT_S: Final = 3600.0  # a lock takes no longer one than threading.TIMEOUT_MAX


class Sampled(Protocol):
    """Who is given samples."""

    sample_every_s: float

    def sample(self, now_s: float, values: Bytes) -> None:
        """Take what the counters showed at this moment of ``time.monotonic``."""

    def renew_lock(self) -> None:
        """In a fork of this process the thread may have held it, and nobody is left to release it."""


class _Sampler:
    """The thread and whom it reads for; ``readings`` is open for as long as there is anyone."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Know nobody: in a fork of this process the thread does not go on."""
        self._lock = threading.Lock()
        self._due: dict[Sampled, float] = {}
        self._thread: threading.Thread | None = None
        # What the thread waits for: locked while there is no news for it. Each thread has its own.
        self._news = threading.Lock()
        self._waits_until_s = 0.0

    def everyone(self) -> tuple[Sampled, ...]:
        """Return whom it reads for."""
        return tuple(self._due)

    def add(self, sampled: Sampled) -> None:
        """Sample for one more; start the thread for the first."""
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

    def remove(self, sampled: Sampled, *, stays: bool = False) -> threading.Thread | None:
        """Sample for one fewer; with the last return the thread, which ends now, or soon where it ``stays``."""
        with self._lock:
            self._due.pop(sampled, None)
            if self._due or stays or self._thread is None:
                return None
            thread = self._thread
            self._close()
            self._wake()
        return thread

    def _wake(self) -> None:
        """Have the thread look again; whoever calls this holds the lock."""
        if self._news.locked():
            self._news.release()

    def _close(self) -> None:
        self._thread = None
        readings.end()

    def _run(self, news: threading.Lock) -> None:
        me = threading.current_thread()
        wait_s, is_last_wait = 0.0, False
        while True:
            # A plain lock: a condition makes one at each wait, in a thread that has to wake up as seldom and as briefly as it can.
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
                    with contextlib.suppress(Exception):  # a device that is lost: this sample is, not the user's work
                        values = readings.now()
                is_last_wait = not self._due
                self._waits_until_s = min(self._due.values(), default=now_s + _STAYS_S)
                wait_s = min(max(0.0, self._waits_until_s - now_s), _LONGEST_WAIT_S)
            for sampled in due:
                with contextlib.suppress(Exception):
                    sampled.sample(now_s, values)


sampler = _Sampler()


def _renew() -> None:
    """In a fork of this process."""
    for sampled in sampler.everyone():
        sampled.renew_lock()
    readings.forget_files()
    sampler.begin_anew()


os.register_at_fork(after_in_child=_renew)
