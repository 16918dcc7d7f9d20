"""Deliver a run's outbox in a separate process; the run never waits for the database.

The run starts this process after a write if none is alive, and then sends nothing more. The process
reads the outbox itself and records how far it is delivered. Its standard input ends when the run
ends or is killed. It then delivers a last time, and answers with one JSON line. If the outbox has
not grown for a while, the process exits, so that a server that runs for weeks keeps no process for
one write.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, Final

from oomguard.core.errors import NoJournalError
from oomguard.core.process import python_command, python_environment
from oomguard.journal.location import JournalUrl
from oomguard.journal.outbox import delivered_of, note_delivered, read_from
from oomguard.report.json import json_line

# Pause between deliveries, so that writes are grouped and a fleet's jobs do not connect constantly.
_BETWEEN_S: Final = 5.0
# After a failure the pause doubles up to this limit. It is random, so that a fleet does not return
# at the same moment.
_LONGEST_PAUSE_S: Final = 60.0
_IDLE_S: Final = 30.0
# Outboxes of earlier runs are delivered once per process, and no longer than this after the run.
_MOST_OF_OTHERS: Final = 100
_AFTER_THE_RUN_S: Final = 60.0
_EXIT_S: Final = 5.0
_NICE: Final = 5

# These processes outlive their run. Python warns if such an object is dropped before its process
# ends.
_released: Final[list[subprocess.Popen[bytes]]] = []


class DeliveryProcess:
    """Start the delivery process for a run, and wait for it only at the end.

    Raises:
        OSError: if no more processes are permitted.
    """

    def __init__(self, location: JournalUrl, path: Path) -> None:
        self._process = subprocess.Popen(
            python_command(__name__),
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the command
        )
        # The URL may contain a password, which must not appear on a command line.
        task = json_line({"url": location.url, "path": os.fspath(path)})
        with contextlib.suppress(OSError):  # the process has ended already
            self._stdin.write(f"{task}\n".encode())
            self._stdin.flush()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None  # noqa: S101 - always a pipe
        return self._process.stdin

    @property
    def is_alive(self) -> bool:
        """Whether the process still watches the outbox."""
        return self._process.poll() is None

    def last_answer(self, wait_s: float) -> dict[str, Any] | None:
        """Announce the end of the run and return the answer; None after ``wait_s`` seconds."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        out = self._process.stdout
        assert out is not None  # noqa: S101 - always a pipe
        poll = select.poll()  # select() accepts no descriptor above 1023
        poll.register(out, select.POLLIN)
        if not poll.poll(max(0.0, wait_s) * 1000):
            return None
        line = out.readline()
        if not line:
            # Output ends a moment before the process does. If the caller asked in between, it
            # would take a process that is gone for one that is late.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            return None
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        return None

    def release(self) -> None:
        """Let the process continue with the outboxes of earlier runs."""
        self._close()
        _released.append(self._process)

    def kill(self) -> None:
        """Kill the process; its current write is one transaction."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _Deliverer:
    """Run the deliveries inside the delivery process."""

    def __init__(self, location: JournalUrl, path: Path) -> None:
        self._location = location
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._is_over = threading.Event()
        self._others_are_done = False

    def wait_for_end(self) -> None:
        """Wait for the end of the run, and exit some time after it."""
        with contextlib.suppress(OSError):
            sys.stdin.read()
        self._is_over.set()
        time.sleep(_AFTER_THE_RUN_S)
        os._exit(0)  # the current write is one transaction

    def run(self) -> None:
        """Deliver until the run ends, or until it has written nothing for a while."""
        failures = 0
        idle_since = time.monotonic()
        while True:
            is_last = self._is_over.is_set()
            answer: dict[str, Any] = {}
            try:
                if self._deliver():
                    idle_since = time.monotonic()
                failures = 0
            except Exception as error:  # noqa: BLE001
                # An error of the database or the disk must not stop the run.
                hint = getattr(error, "hint", None)
                if hint:
                    answer["failure"] = f"{error}; {hint}"
                else:
                    answer["failure"] = str(error)
                answer["is_refused"] = isinstance(error, NoJournalError)
                failures += 1
            if is_last:
                with contextlib.suppress(OSError):  # a killed run reads no answer
                    print(json_line(answer), flush=True)  # noqa: T201 - to the run
                if not failures:
                    self._deliver_others()
                return
            if not failures and time.monotonic() - idle_since > _IDLE_S:
                return
            pause_s = min(_LONGEST_PAUSE_S, _BETWEEN_S * 2 ** min(failures, 10))
            self._is_over.wait(pause_s * random.uniform(0.5, 1))  # noqa: S311

    def _deliver(self) -> bool:
        """Deliver new records; return whether there were any."""
        from oomguard.journal.outbox import deliver

        rows, end = read_from(self._fd, delivered_of(self._path, self._fd))
        if rows:
            deliver(self._location, rows)
            note_delivered(self._path, end)
        # the run's own records come first, and the run's end waits for them
        if not self._is_over.is_set():
            self._deliver_others()
        return bool(rows)

    def _deliver_others(self) -> None:
        """Deliver the outboxes of earlier runs once; a failure does not concern this run."""
        from oomguard.journal.outbox import deliver_abandoned

        if not self._others_are_done:
            was_over = self._is_over.is_set()
            with contextlib.suppress(Exception):
                deliver_abandoned(
                    self._location, _MOST_OF_OTHERS, lambda: self._is_over.is_set() and not was_over
                )
                self._others_are_done = was_over or not self._is_over.is_set()


def main() -> None:
    """Deliver for the run that started this process.

    The first line of standard input names the database and the outbox.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # never preempts the job
    task = json.loads(sys.stdin.readline())
    deliverer = _Deliverer(JournalUrl(task["url"]), Path(task["path"]))
    threading.Thread(target=deliverer.wait_for_end, daemon=True).start()
    deliverer.run()
    os._exit(0)  # the waiting thread holds standard input
