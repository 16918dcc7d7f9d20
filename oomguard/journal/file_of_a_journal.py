"""Whether a file is part of a journal, whichever run keeps it: the database, what SQLite has beside it, and what waits for a server."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Final

from oomguard.journal.spool import is_spooled

_BESIDE: Final = ("-journal", "-wal", "-shm")
# Of every schema so far; a table of another program that has that name has not these columns too.
_IS_JOURNAL: Final = "SELECT count(*) = 4 FROM pragma_table_info('attempt') WHERE name IN ('session', 'patches', 'incident', 'predicted')"


def is_of_a_journal(path: str) -> bool:
    """Return whether a file belongs to a journal of oomguard; one that cannot be read does not. Nothing is locked."""
    if is_spooled(Path(path)):
        return True
    ends = next((end for end in _BESIDE if path.endswith(end)), "")
    return any(_is_journal(name) for name in {path, path.removesuffix(ends)})


def _is_journal(path: str) -> bool:
    with contextlib.suppress(sqlite3.Error, OSError, ValueError):
        # Immutable: SQLite neither locks it nor rolls back what another program has half written.
        uri = f"{Path(path).as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            return bool(database.execute(_IS_JOURNAL).fetchone()[0])
    return False
