"""A journal that several share: the job writes to a file of its machine and goes on, a process beside it brings that to the database."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from oomguard.errors import InputError
from oomguard.journal.delivery import Delivery, Undelivered
from oomguard.journal.going import Going
from oomguard.journal.place import Shared
from oomguard.journal.record import Ended, Ran, Record
from oomguard.journal.spool import Spool, folder_of

# Runs are removed by their age: of an attempt that took less than this the beginning need not be written again with its end.
_OLD_S: Final = 60.0


class SharedJournal:
    """Keeps the attempts of one run, as ``Journal`` does, for a shared database; what it returned from survives its death.

    Args:
        shared: the database.

    Raises:
        InputError: this machine has no place to write to.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._folder = folder_of(shared)
        if not self._folder.is_absolute():
            raise InputError("no home folder is known")
        self._spool: Spool | None = None
        self._delivery: Delivery | None = None
        self._session = ""
        self._begun: Record | None = None
        self._first: Record | None = None
        self._going: Going | None = None

    @property
    def path(self) -> Path:
        """The file that it writes."""
        return self._folder if self._spool is None else self._spool.path

    def begin(self, record: Record) -> int:
        """Write the record of an attempt that starts now, and return its number for ``end``.

        Raises:
            InputError: this machine has no place to write to.
            OSError: its disk is full or gone.
        """
        record = record if record.started_at else replace(record, started_at=time.time())
        record = record.after(self._first)
        if self._spool is None:
            try:
                self._spool = Spool(self._folder, record.session)
            except OSError as error:
                hint = "export XDG_STATE_HOME=DIR chooses another place for what waits for a shared journal"
                raise InputError(f"{self._folder}: {error.strerror or error}", hint=hint) from None
            self._session, self._first, self._going = record.session, record, Going(record.session)
            self._delivery = Delivery(self.shared, self._spool)
        self._make_room()
        self._spool.begin(record)
        self._begun = record
        self._wake()
        return record.number

    def end(
        self,
        row: int,
        *,
        exit_status: int,
        incident: Mapping[str, Any] | None,
        measured: Mapping[str, Any],
        ran: Ran | None = None,
        set_by_user: Mapping[str, bool | None] | None = None,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        """Complete a record: ``row`` is what ``begin`` returned, all else is as ``Ended`` has it.

        Raises OSError as ``begin`` does.
        """
        ended = Ended(exit_status, incident, measured, ran, set_by_user, seconds, error, time.time())
        if self._spool is not None and self._begun is not None:
            self._make_room()
            is_old = ended.ended_at - self._begun.started_at >= _OLD_S
            self._spool.end(self._session, row, ended, self._begun if is_old else None)
            self._wake()

    def finish(self, wait_s: float) -> Undelivered | None:
        """Wait so long at most until all is delivered; return what is not, which a later run delivers."""
        if self._going is not None:
            self._going.end()
        if self._spool is None or self._delivery is None:
            return None
        left = self._delivery.finish(wait_s)
        self._spool.close(is_delivered=left is None)
        self._spool = None
        return left

    def _make_room(self) -> None:
        if self._delivery is not None:
            self._delivery.make_room()

    def _wake(self) -> None:
        if self._delivery is not None:
            self._delivery.wake()
