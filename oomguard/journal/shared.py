"""Write to a shared journal: a run writes to its outbox, and a second process delivers it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import InputError
from oomguard.journal.codec import AttemptEnd, AttemptRow, RunIdentity
from oomguard.journal.delivery_process import DeliveryProcess
from oomguard.journal.liveness import LivenessLock
from oomguard.journal.location import JournalUrl
from oomguard.journal.outbox import Outbox, attempts_in, waiting

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
        """Complete an attempt: ``begun`` is the result of ``begin``, the rest as in ``Ended``.

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
            self._process.kill()  # also reaps the process
            self._process = None
        try:
            self._process = DeliveryProcess(self.location, outbox.path)
            self._failure = ""
        except OSError as error:
            self._failure = str(error)
