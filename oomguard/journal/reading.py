"""Reading a journal that others write, without changing it: any schema up to this version's, and clear words for what is none."""

from __future__ import annotations

import contextlib
import json
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from oomguard.errors import InputError
from oomguard.journal.schema import SCHEMA_VERSION, prepare, version_of
from oomguard.journal.store import default_path
from oomguard.regular_file import open_regular

_BUSY_S: Final = 10.0
_UPGRADE: Final = "pip install --upgrade oomguard"
_ELSEWHERE: Final = "--journal PATH names another one"


@contextlib.contextmanager
def reading(path: Path | None = None, *, busy_s: float = _BUSY_S) -> Iterator[sqlite3.Connection | None]:
    """Open a journal for reading; the connection has the tables of this version.

    An older file is copied into memory and migrated there, so that a folder that cannot be written is read too.

    Args:
        path: the journal; None: the user's own, of which there may be none yet (None is yielded then).
        busy_s: how long to wait for others that hold it locked.

    Raises:
        InputError: it is missing, is not readable, is locked, is damaged, or is no journal of this version or before.
    """
    place = path or default_path()
    try:
        if path is None and not place.exists():
            yield None
            return
        open_regular(place).close()  # a FIFO would be waited for
        with contextlib.closing(_open(place, busy_s)) as file, _of_this_version(file) as database:
            yield database
    except OSError as error:
        raise InputError(f"{place}: {error.strerror or error}", hint=_ELSEWHERE) from None
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: a record is no JSON: {error}", hint=_damaged(place)) from None
    except sqlite3.Error as error:
        raise InputError(f"{place}: {error}", hint=_hint(place, error)) from None


def _open(path: Path, busy_s: float) -> sqlite3.Connection:
    # Not read-only: what a killed writer left half written is rolled back by who comes next.
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=busy_s)
    database.execute("PRAGMA query_only = ON")
    return database


@contextlib.contextmanager
def _of_this_version(file: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    if version_of(file) == SCHEMA_VERSION:
        yield file
        return
    with contextlib.closing(sqlite3.connect(":memory:")) as copy:
        file.backup(copy)
        prepare(copy)
        copy.commit()
        yield copy


def _hint(path: Path, error: sqlite3.Error) -> str:
    text = str(error)
    if "newer oomguard" in text:
        return _UPGRADE
    if "locked" in text or "busy" in text:
        return "another program holds it; try again when that has ended"
    if "malformed" in text:
        return _damaged(path)
    return _ELSEWHERE


def _damaged(path: Path) -> str:
    old, new = shlex.quote(str(path)), shlex.quote(f"{path}.damaged")
    return f"it is damaged; keep it apart, and the next run begins a new one: mv {old} {new}"
