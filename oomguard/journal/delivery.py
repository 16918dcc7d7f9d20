"""The thread that brings what a run writes to the shared journal, while the run goes on."""

from __future__ import annotations

import random
import shlex
import sys
import threading
from dataclasses import dataclass
from typing import Final

from oomguard.journal.place import Shared
from oomguard.journal.spool import Spool, attempts_in, read_from

# Between two deliveries: what is written meanwhile goes together, and a fleet's jobs do not knock all the time.
_BETWEEN_S: Final = 5.0
# After a failed one twice as long each time, and not all jobs of a fleet at the same moment.
_LONGEST_PAUSE_S: Final = 60.0
# While this thread works, the job's gets Python's lock back within that, not within 5 ms: a write waits for it.
_SWITCH_S: Final = 0.0003
# Of runs that left something behind, in one run.
_MOST_OF_OTHERS: Final = 100


@dataclass(frozen=True, slots=True)
class Undelivered:
    """What waits on this machine when a run ends, why, and the command that delivers it."""

    attempts: int
    reason: str
    command: str


class Delivery:
    """Delivers what a run writes, then what runs before it left behind. It dies with the process: nothing waits for it.

    Args:
        shared: where to.
        spool: what the run writes.
    """

    def __init__(self, shared: Shared, spool: Spool) -> None:
        self._shared, self._spool = shared, spool
        self._is_new, self._is_over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._start = 0
        self._failure = ""
        self._others_are_done = False

    @property
    def is_at_work(self) -> bool:
        """Whether the thread still runs."""
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        """Have what is new delivered."""
        self._is_new.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="oomguard-deliver", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads are permitted
                self._failure = str(error)

    def finish(self, wait_s: float) -> Undelivered | None:
        """Deliver at once; wait so long at most, and no longer than one try takes that fails. Return what is left."""
        self._is_over.set()
        self._is_new.set()
        if self.is_at_work and self._thread is not None:
            self._thread.join(wait_s)
        rows, _end = read_from(self._spool.fd, self._start)
        reason = self._failure or f"the database had not taken it after {wait_s:g} s"
        command = f"oomguard history --deliver --journal {shlex.quote(str(self._shared))}"
        return Undelivered(attempts_in(rows), reason, command) if rows else None

    def _run(self) -> None:
        failed = 0
        while True:
            self._is_new.wait()
            self._is_new.clear()
            is_last = self._is_over.is_set()
            if self._deliver():
                failed = 0
            else:
                failed += 1
                self._is_new.set()
            if is_last:
                return
            pause_s = min(_LONGEST_PAUSE_S, _BETWEEN_S * 2 ** min(failed, 10)) * random.uniform(0.5, 1)  # noqa: S311
            self._is_over.wait(pause_s)

    def _deliver(self) -> bool:
        """Return whether all is delivered that was there."""
        before = sys.getswitchinterval()
        try:
            sys.setswitchinterval(_SWITCH_S)
            from oomguard.journal.delivering import deliver, deliver_left_behind

            rows, end = read_from(self._spool.fd, self._start)
            if rows:
                deliver(self._shared, rows)
            self._start = 0 if self._spool.empty(end) else end
            if not self._others_are_done and not self._is_over.is_set():
                deliver_left_behind(self._shared, _MOST_OF_OTHERS)
                self._others_are_done = True
        except Exception as error:  # noqa: BLE001 - of the database, its driver or the disk: it waits, and the job goes on
            hint = getattr(error, "hint", None)
            self._failure = f"{error}; {hint}" if hint else str(error)
            return False
        finally:
            sys.setswitchinterval(before)
        self._failure = ""
        return True
