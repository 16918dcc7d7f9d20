"""Write to a shared journal: a run writes to its outbox, and a second process delivers it.

The run never waits for the database. It starts the process after a write if none is alive, and then
sends nothing more. The process reads the outbox itself and records how far it is delivered. Its
standard input ends when the run ends or is killed. It then delivers a last time, and answers with
one JSON line. If the outbox has not grown for a while, the process exits, so that a server that
runs for weeks keeps no process for one write.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

from oomguard.core.errors import InputError, NoJournalError
from oomguard.core.process import python_command, python_environment
from oomguard.journal.codec import AttemptEnd, AttemptRow, RunIdentity
from oomguard.journal.location import JournalUrl
from oomguard.journal.outbox import (
    Outbox,
    attempts_in,
    delivered_of,
    note_delivered,
    read_from,
    waiting,
)
from oomguard.journal.store import LivenessLock
from oomguard.report.json import json_line

# ``history --keep`` may have removed the begin of an attempt that took longer than this, so its end
# includes the begin again.
_OLD_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Describe the records that wait on this machine when a run ends.

    Attributes:
        attempts: the number of attempts.
        reason: why they wait.
        command: the command that delivers them.
        is_refused: whether no later run can deliver them either.
    """

    attempts: int
    reason: str
    command: str
    is_refused: bool = False


class SharedJournal:
    """Write the attempts of one run, like ``Journal``; they survive the death of the process.

    Args:
        location: the database.

    Raises:
        InputError: if this machine has no folder for the outbox.
    """

    def __init__(self, location: JournalUrl) -> None:
        self.location = location
        if not location.outbox.is_absolute():
            raise InputError("oomguard found no home folder for the outbox")
        self._outbox: Outbox | None = None
        self._process: DeliveryProcess | None = None
        self._failure = ""
        self._first: AttemptRow | None = None
        self._lock: LivenessLock | None = None

    @property
    def path(self) -> Path:
        """The file that this run writes."""
        if self._outbox is None:
            return self.location.outbox
        return self._outbox.path

    def begin(self, record: AttemptRow) -> AttemptRow:
        """Write an attempt that starts now, and return its record for ``end``.

        Raises:
            InputError: if this machine has no folder for the outbox.
            OSError: if its disk is full or gone.
        """
        if not record.started_at:
            record = replace(record, started_at=time.time())
        record = record.after(self._first)
        if self._outbox is None:
            try:
                self._outbox = Outbox(self.location.outbox, record.session)
            except OSError as error:
                hint = "choose another folder for waiting records with: export XDG_STATE_HOME=DIR"
                raise InputError(
                    f"{self.location.outbox}: {error.strerror or error}", hint=hint
                ) from None
            self._first = record
            self._lock = LivenessLock(record.session)
        self._outbox.begin(record)
        self._start_delivery(self._outbox)
        return record

    def end(
        self,
        begun: AttemptRow,
        *,
        exit_status: int,
        incident: Mapping[str, Any] | None,
        measured: Mapping[str, Any],
        ran: RunIdentity | None = None,
        set_by_user: Mapping[str, bool | None] | None = None,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        """Complete an attempt: ``begun`` is the result of ``begin``, the rest as in ``AttemptEnd``.

        Raises:
            OSError: as in ``begin``.
        """
        now = time.time()
        ended = AttemptEnd(exit_status, incident, measured, ran, set_by_user, seconds, error, now)
        if self._outbox is not None:
            self._outbox.end(begun, ended, in_full=now - begun.started_at >= _OLD_S)
            self._start_delivery(self._outbox)

    def finish(self, wait_s: float) -> Undelivered | None:
        """Wait at most ``wait_s`` seconds for the delivery; return what is left for a later run."""
        if self._lock is not None:
            self._lock.release()
        if self._outbox is None:
            return None
        answer = self._last_answer(self._outbox, time.monotonic() + wait_s)
        rows = self._outbox.undelivered
        others_wait = any(path != self._outbox.path for path in waiting(self.location.outbox))
        if self._process is not None:
            if others_wait and not rows:
                self._process.release()
            else:
                self._process.kill()
        self._outbox.close(is_delivered=not rows)
        self._outbox = self._process = None
        if not rows:
            return None
        reason = answer.get("failure") or f"the database did not accept it within {wait_s:g} s"
        command = f"oomguard history --deliver --journal {shlex.quote(str(self.location))}"
        return Undelivered(attempts_in(rows), reason, command, answer.get("is_refused", False))

    def _last_answer(self, outbox: Outbox, until: float) -> dict[str, Any]:
        """Deliver the rest, and return the answer of the process; empty if it is late."""
        # A process that had just exited because it was idle did not see the last write.
        for _ in range(2):
            if not outbox.undelivered:
                return {}
            self._start_delivery(outbox)
            if self._process is None:
                return {"failure": self._failure}
            answer = self._process.last_answer(until - time.monotonic())
            if answer is not None:
                return answer
            if self._process.is_alive:
                return {}
        return {"failure": "the delivery process ended"}

    def _start_delivery(self, outbox: Outbox) -> None:
        """Start the delivery process, unless it is alive."""
        if self._process is not None:
            if self._process.is_alive:
                return
            # kill() also reaps the process.
            self._process.kill()
            self._process = None
        try:
            self._process = DeliveryProcess(self.location, outbox.path)
            self._failure = ""
        except OSError as error:
            self._failure = str(error)


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
        # The process may have ended already.
        with contextlib.suppress(OSError):
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
        # select() accepts no descriptor above 1023.
        poll = select.poll()
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
        # Ending here loses nothing, because the current write is one transaction.
        os._exit(0)

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
                # A killed run reads no answer.
                with contextlib.suppress(OSError):
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
    """Deliver the outbox of the run that started this process.

    The first line of standard input names the database and the outbox.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)
        # A batch process never preempts the job.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    task = json.loads(sys.stdin.readline())
    deliverer = _Deliverer(JournalUrl(task["url"]), Path(task["path"]))
    threading.Thread(target=deliverer.wait_for_end, daemon=True).start()
    deliverer.run()
    # A normal exit would wait for the thread that reads standard input.
    os._exit(0)
