"""What a run writes for a shared journal waits in a file of this machine until it is delivered: a job waits for no database.

One file a run, a line a record. What a call has written when it returns is in the kernel's hands: it survives any death of the process,
and not that of the machine. The writer locks its file for as long as it lives, and the kernel releases that: who comes later delivers
the files that nobody locks. A last line without an end is of a call that never returned. How far a file is delivered stands in another
beside it: to cut it off would keep a job's call waiting for the file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.journal.place import Shared
from oomguard.journal.record import Ended, Ran, Record
from oomguard.report.json import json_line, plain_value
from oomguard.user_files import make_folder, state_file

FORM: Final = 1
_FOLDER: Final = "undelivered"
_ENDS: Final = ".jsonl"
_DELIVERED: Final = ".delivered"
_RIGHTS: Final = 0o600
_SURROGATE: Final = "\\ud"  # how json_line writes half a character


def folder_of(shared: Shared) -> Path:
    """Return the folder of what waits for a shared journal."""
    return state_file(_FOLDER) / shared.name


def is_spooled(path: Path) -> bool:
    """Return whether a file is what some run has written for a shared journal, or says how far that is delivered: by its place and name."""
    above = [folder.name for folder in path.parents[1:3]]
    return path.suffix in {_ENDS, _DELIVERED} and above == [_FOLDER, state_file(_FOLDER).parent.name]


class Spool:
    """The file of one run that writes.

    Args:
        folder: as ``folder_of`` has it; it is made.
        session: the run's name in the journal.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path, session: str) -> None:
        make_folder(folder, 0o700)
        self.path = folder / f"{session}{_ENDS}"
        self.fd = _locked(self.path)
        self._delivered_fd = os.open(self.path.with_suffix(_DELIVERED), os.O_WRONLY | os.O_CREAT, _RIGHTS)
        self._size = 0
        self._one_at_a_time = threading.Lock()

    def begin(self, record: Record) -> None:
        """Write that an attempt begins; raises OSError where the disk is full or gone."""
        self._append("begin", record.session, record.number, _fields(record))

    def end(self, session: str, number: int, ended: Ended, begun: Record | None = None) -> None:
        """Write how an attempt ended, and how it began where the database may not have that any more; raises OSError as ``begin`` does."""
        ran = None if ended.ran is None else _fields(ended.ran)
        more = {} if begun is None else {"begun": _fields(begun)}
        self._append("end", session, number, {**_fields(ended), "ran": ran}, **more)

    def _append(
        self, kind: str, session: str, number: int, fields: Mapping[str, Any], **more: Mapping[str, Any]
    ) -> None:
        row = {"form": FORM, "kind": kind, "session": session, "number": number, "fields": fields, **more}
        line = _line(row)
        with self._one_at_a_time:
            written = os.write(self.fd, line)
            if written != len(line):  # the disk is full: half a line would spoil the next one
                os.ftruncate(self.fd, self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._size += written

    @property
    def size(self) -> int:
        """How many bytes it holds."""
        return self._size

    def empty(self, end: int) -> bool:
        """Drop all that is there, unless there is more than ``end`` bytes by now; return whether it was dropped."""
        with self._one_at_a_time:
            if self._size != end:
                return False
            _write_end(self._delivered_fd, 0)  # first: what comes next counts as new in any case
            os.ftruncate(self.fd, 0)
            self._size = 0
            return True

    def close(self, *, is_delivered: bool) -> None:
        """Let go of the file; where all of it is delivered, it goes."""
        if is_delivered:
            remove(self.path)
        os.close(self.fd)
        os.close(self._delivered_fd)


def note_delivered(path: Path, end: int) -> None:
    """Write down that a run's file is delivered up to this byte; of one that is gone nothing."""
    with contextlib.suppress(OSError):  # else it is delivered once more, which changes nothing
        fd = os.open(path.with_suffix(_DELIVERED), os.O_WRONLY)
        try:
            _write_end(fd, end)
        finally:
            os.close(fd)


def delivered_of(path: Path, fd: int) -> int:
    """Return up to which byte a file is known to be delivered."""
    with contextlib.suppress(OSError, ValueError):
        end = int(path.with_suffix(_DELIVERED).read_bytes())
        return end if 0 <= end <= os.fstat(fd).st_size else 0
    return 0


def remove(path: Path) -> None:
    """Remove a file that is delivered, and what tells so."""
    path.with_suffix(_DELIVERED).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _write_end(fd: int, end: int) -> None:
    os.pwrite(fd, b"%020d" % end, 0)


def _locked(path: Path) -> int:
    """Make a file and lock it; one that a deliverer took away as empty in between is made again."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _RIGHTS)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        os.close(fd)


@contextlib.contextmanager
def left_behind(folder: Path) -> Iterator[Iterator[tuple[Path, int]]]:
    """Yield path and descriptor of each file whose writer is gone, the oldest first; it is locked until the next one is asked for."""

    def each() -> Generator[tuple[Path, int], None, None]:
        for path in waiting(folder):
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:  # another has delivered it
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, fd
            except BlockingIOError:  # its writer lives
                continue
            finally:
                os.close(fd)

    files = each()
    try:
        yield files
    finally:
        files.close()


def waiting(folder: Path) -> list[Path]:
    """Return the files of a folder, the oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.glob(f"*{_ENDS}"):
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def read_from(fd: int, start: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records from a byte on that are whole, and the byte behind them.

    A line that is no record of ours is passed over; one of a later form is an error.

    Raises:
        ValueError: a later oomguard wrote it.
    """
    text = os.pread(fd, max(0, os.fstat(fd).st_size - start), start)
    whole = text[: text.rfind(b"\n") + 1]
    rows = []
    for line in whole.split(b"\n"):
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
            row = json.loads(line)
            if isinstance(row, dict):
                if row.get("form") != FORM:
                    raise ValueError(f"written in form {row.get('form')} by another oomguard, this one reads {FORM}")
                rows.append(row)
    return rows, start + len(whole)


def _line(row: Mapping[str, Any]) -> bytes:
    """Return a record as a line; to make all of its values plain first takes as long as to write them, and is seldom needed."""
    try:
        line = json_line(row)
    except (TypeError, ValueError):  # NaN, a type of somebody's own
        line = _SURROGATE
    return f"{json_line(plain_value(row)) if _SURROGATE in line else line}\n".encode()


def _fields(record: Record | Ended | Ran) -> dict[str, Any]:
    """Return a record by the names of its fields; ``asdict`` would copy all that is in them, which costs most of a write."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def record_in(row: Mapping[str, Any]) -> Record | Ended | None:
    """Return what a line holds: an attempt that begins, or how one ended; None where it holds neither."""
    try:
        fields = dict(row["fields"])
        if row["kind"] == "begin":
            return Record(**fields)
        ran = fields.pop("ran", None)
        return Ended(**fields, ran=None if ran is None else Ran(**ran))
    except (KeyError, TypeError, ValueError):  # spoiled
        return None


def begun_in(row: Mapping[str, Any]) -> Record | None:
    """Return how the attempt began whose end a line holds; None where it does not say."""
    try:
        return Record(**row["begun"])
    except (KeyError, TypeError):
        return None


def attempts_in(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return how many attempts lines are about."""
    return len({(row.get("session"), row.get("number")) for row in rows})
