"""Each attempt of a run in the journal; a journal that fails is left out and the run goes on."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

from oomguard.facts import FactValue
from oomguard.incident import Attempt, Patch
from oomguard.journal.store import Journal, Record
from oomguard.log import get_logger
from oomguard.report.json import incident_dict, patch_dict

T = TypeVar("T")


class Keeper:
    """Write the attempts of one run, as far as they can be written.

    Attributes:
        journal: where they go; None where nothing is kept, or no longer.
    """

    def __init__(self, journal: Journal | None) -> None:
        self.journal = journal
        self._session = uuid.uuid4().hex

    def begin(
        self, number: int, command: list[str], settings: Mapping[str, FactValue], patches: tuple[Patch, ...]
    ) -> int | None:
        """Write that an attempt begins; return its row."""
        predicted = {name: value for patch in patches for name, value in patch.predicts.items()}
        dicts = [patch_dict(patch) for patch in patches]
        record = Record(self._session, number, command, dict(settings), dicts, predicted=predicted)
        return self._keep(lambda kept: kept.begin(record))

    def end(self, row: int | None, attempt: Attempt) -> None:
        """Write how the attempt of a row ended."""
        incident = incident_dict(attempt.incident) if attempt.incident else None
        if row is not None:
            status = attempt.exit_status if attempt.exit_status is not None else 125
            self._keep(lambda kept: kept.end(row, exit_status=status, incident=incident, measured=attempt.measured))

    def _keep(self, write: Callable[[Journal], T]) -> T | None:
        """Write to the journal; where that fails, say so once and go on without it."""
        if self.journal is None:
            return None
        try:
            return write(self.journal)
        except (sqlite3.Error, OSError) as error:
            get_logger().warning("the journal is left out", path=str(self.journal.path), error=str(error))
            self.journal = None
            return None
