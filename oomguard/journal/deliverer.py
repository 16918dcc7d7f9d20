"""The process that brings what a run writes to the shared journal, while the run goes on.

It reads orders, one JSON object a line, and answers alike: how far the run's file is delivered, or why it is not. It only reads that
file, up to the last whole line; the run empties it only once it has heard that all of it is delivered. It leaves when there is nothing
to do, and at once when the run is killed: what it has not delivered then, a later run delivers. A run that has ended, and whose own
file is delivered, does not wait for it: it goes on for a while with what earlier runs left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from oomguard.errors import NoJournalError
from oomguard.journal.place import Shared
from oomguard.journal.spool import note_delivered, read_from
from oomguard.report.json import json_line

# Between two deliveries: what is written meanwhile goes together, and a fleet's jobs do not knock all the time.
_BETWEEN_S: Final = 5.0
# After a failed one twice as long each time, and not all jobs of a fleet at the same moment.
_LONGEST_PAUSE_S: Final = 60.0
# A run that serves for weeks keeps no process for what it writes once.
_IDLE_S: Final = 30.0
# Of runs that left something behind, in one run; where that run has ended, no longer than so.
_MOST_OF_OTHERS: Final = 100
_AFTER_THE_RUN_S: Final = 60.0
# The job comes first; the end of a run waits for it too.
_NICE: Final = 5


class Deliverer:
    """Delivers what a run's file holds, then what runs before it left behind.

    Args:
        shared: where to.
        path: the run's file.
        fd: the same, opened.
        answers: where it says how far it is.
    """

    def __init__(self, shared: Shared, path: Path, fd: int, answers: TextIO) -> None:
        self._shared, self._path, self._fd, self._answers = shared, path, fd, answers
        self._is_new, self._is_last = threading.Event(), threading.Event()
        self._round = 0
        self._done = (0, 0)
        self._others_are_done = False

    def listen(self, orders: TextIO) -> None:
        """Take orders; end the process when the run is gone, or some time after one that has said that it ends."""
        with contextlib.suppress(OSError):  # the run went without having read an answer
            for line in orders:
                self.take(json.loads(line))
        if self._is_last.is_set():
            time.sleep(_AFTER_THE_RUN_S)
        os._exit(0)  # whatever is under way: it is in one transaction

    def take(self, order: Mapping[str, Any]) -> None:
        """Take an order: to deliver what the file holds after it was emptied so often; the last one at once."""
        self._round = order["round"]
        if order["is_last"]:
            self._is_last.set()
        self._is_new.set()

    def run(self) -> None:
        """Deliver until there is nothing to do."""
        failed = 0
        while self._is_new.wait(_IDLE_S):
            self._is_new.clear()
            is_last = self._is_last.is_set()
            if self._deliver():
                failed = 0
            else:
                failed += 1
                self._is_new.set()
            if is_last:
                if failed == 0:
                    # Nobody is there any more to be told: the next run tries again.
                    with contextlib.suppress(Exception):
                        self._deliver_others(lambda: False)
                return
            pause_s = min(_LONGEST_PAUSE_S, _BETWEEN_S * 2 ** min(failed, 10)) * random.uniform(0.5, 1)  # noqa: S311
            self._is_last.wait(pause_s)

    def _deliver(self) -> bool:
        """Return whether all is delivered that was asked for."""
        try:
            from oomguard.journal.delivering import deliver

            number = self._round
            start = self._done[1] if self._done[0] == number else 0  # the run emptied its file
            rows, end = read_from(self._fd, start)
            if rows:
                deliver(self._shared, rows)
            self._done = (number, end)
            note_delivered(self._path, end)
            self._answer(round=number, end=end)
            self._deliver_others(self._is_last.is_set)  # the run's own come first, and its end waits for them
        except Exception as error:  # noqa: BLE001 - of the database, its driver or the disk: it waits, and the job goes on
            hint = getattr(error, "hint", None)
            failure = f"{error}; {hint}" if hint else str(error)
            self._answer(failure=failure, is_refused=isinstance(error, NoJournalError))
            return False
        return True

    def _deliver_others(self, is_over: Callable[[], bool]) -> None:
        """Deliver, once, what runs before left behind."""
        from oomguard.journal.delivering import deliver_left_behind

        if not self._others_are_done and not is_over():
            deliver_left_behind(self._shared, _MOST_OF_OTHERS, is_over)
            self._others_are_done = not is_over()

    def _answer(self, **fields: object) -> None:
        may_be_gone = self._is_last.is_set()
        with contextlib.suppress(OSError) if may_be_gone else contextlib.nullcontext():
            self._answers.write(f"{json_line(fields)}\n")
            self._answers.flush()


def main() -> None:
    """Deliver for the run that started this process; its first line names the database and the file."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
        os.sched_setscheduler(
            0, os.SCHED_BATCH, os.sched_param(0)
        )  # told of something, it takes no processor from who told it
    asked = json.loads(sys.stdin.readline())
    path = Path(asked["path"])
    deliverer = Deliverer(Shared(asked["url"]), path, os.open(path, os.O_RDONLY | os.O_NOFOLLOW), sys.stdout)
    threading.Thread(target=deliverer.listen, args=(sys.stdin,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # the run is gone
        deliverer.run()
    os._exit(0)  # the thread that listens holds standard input
