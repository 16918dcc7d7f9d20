"""Keep a run's records in a local file, its outbox, until the shared journal has them.

There is one file for each run and one JSON line for each record. When a call returns, its line is
in the kernel. It survives the death of the process, but not a power failure. The writer locks its
file as long as it lives; any process may deliver an unlocked file. A last line without an end
belongs to a call that never returned. A second file records how far the first is delivered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import JournalError
from oomguard.core.files import make_folder
from oomguard.journal.codec import AttemptEnd, AttemptRow, RunIdentity
from oomguard.journal.location import JournalUrl
from oomguard.journal.postgres import PostgresDatabase, open_server, prepare
from oomguard.journal.store import write_begin, write_end
from oomguard.report.json import json_line, plain_value

FORM: Final = 1
# json_line writes half a character as this escape.
_SURROGATE: Final = "\\ud"


class Outbox:
    """Write the outbox of one run.

    Args:
        folder: ``JournalUrl.outbox``; it is created.
        session: the run's name in the journal.

    Raises:
        OSError: if the file cannot be created.
    """

    def __init__(self, folder: Path, session: str) -> None:
        make_folder(folder, 0o700)
        self.path = folder / f"{session}.jsonl"
        self.fd = _locked(self.path)
        self.path.with_suffix(".delivered").touch(0o600)

    def begin(self, record: AttemptRow) -> None:
        """Write that an attempt begins.

        Raises:
            OSError: if the disk is full or gone.
        """
        self._append(
            {
                "kind": "begin",
                "session": record.session,
                "number": record.number,
                "fields": _fields(record),
            }
        )

    def end(self, begun: AttemptRow, ended: AttemptEnd, *, in_full: bool = False) -> None:
        """Write how an attempt ended; with ``in_full``, also how it began.

        Raises:
            OSError: as in ``begin``.
        """
        if ended.ran is None:
            ran = None
        else:
            ran = _fields(ended.ran)
        row = {
            "kind": "end",
            "session": begun.session,
            "number": begun.number,
            "fields": {**_fields(ended), "ran": ran},
        }
        self._append(row | ({"begun": _fields(begun)} if in_full else {}))

    def _append(self, row: Mapping[str, Any]) -> None:
        line = _line({"form": FORM, **row})
        before = os.fstat(self.fd).st_size
        # On a full disk, half a line would spoil the next one.
        if os.write(self.fd, line) != len(line):
            os.ftruncate(self.fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    @property
    def undelivered(self) -> list[dict[str, Any]]:
        """The records that are not known to be delivered."""
        return read_from(self.fd, delivered_of(self.path, self.fd))[0]

    def close(self, *, is_delivered: bool) -> None:
        """Unlock the file; remove it if all of it is delivered."""
        if is_delivered:
            remove(self.path)
        os.close(self.fd)


def note_delivered(path: Path, end: int) -> None:
    """Record that a file is delivered up to this byte, unless the file is gone."""
    # without the note it is delivered again, which changes nothing
    with contextlib.suppress(OSError):
        fd = os.open(path.with_suffix(".delivered"), os.O_WRONLY)
        try:
            os.pwrite(fd, b"%020d" % end, 0)
        finally:
            os.close(fd)


def delivered_of(path: Path, fd: int) -> int:
    """Return the byte up to which a file is known to be delivered."""
    with contextlib.suppress(OSError, ValueError):
        end = int(path.with_suffix(".delivered").read_bytes())
        if 0 <= end <= os.fstat(fd).st_size:
            return end
        return 0
    return 0


def remove(path: Path) -> None:
    """Remove a delivered file."""
    path.unlink(missing_ok=True)
    path.with_suffix(".delivered").unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """Create and lock a file; retry if another process removed the empty file in between."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        os.close(fd)


@contextlib.contextmanager
def abandoned_outboxes(folder: Path) -> Iterator[Iterator[tuple[Path, int]]]:
    """Yield path and descriptor of each file without a living writer, oldest first and locked."""

    def each() -> Generator[tuple[Path, int], None, None]:
        for path in waiting(folder):
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:
                # Another process has delivered it and removed the file.
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, fd
            except BlockingIOError:
                # The lock shows that its writer lives.
                continue
            finally:
                os.close(fd)

    files = each()
    try:
        yield files
    finally:
        files.close()


def waiting(folder: Path) -> list[Path]:
    """Return the outbox files of a folder, oldest first."""
    found = []
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def read_from(fd: int, start: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records after byte ``start``, and the byte after the last whole line.

    Lines that are not records are skipped.

    Raises:
        ValueError: if a later oomguard wrote the file in another form.
    """
    text = os.pread(fd, max(0, os.fstat(fd).st_size - start), start)
    whole = text[: text.rfind(b"\n") + 1]
    rows = []
    for line in whole.split(b"\n"):
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
            row = json.loads(line)
            if isinstance(row, dict):
                if row.get("form") != FORM:
                    raise ValueError(
                        f"written in form {row.get('form')} by another oomguard, this one reads "
                        f"{FORM}"
                    )
                rows.append(row)
    return rows, start + len(whole)


def _line(row: Mapping[str, Any]) -> bytes:
    """Return a record as a line. Values are rarely special, and converting all of them is slow."""
    try:
        line = json_line(row)
    except (TypeError, ValueError):
        # NaN, or a type that JSON does not know.
        line = _SURROGATE
    return f"{json_line(plain_value(row)) if _SURROGATE in line else line}\n".encode()


def _fields(record: AttemptRow | AttemptEnd | RunIdentity) -> dict[str, Any]:
    """Return a record's fields without copying them, because ``asdict`` would dominate a write."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def record_in(row: Mapping[str, Any]) -> AttemptRow | AttemptEnd | None:
    """Return a line's record: the begin or the end of an attempt; None if it is neither."""
    try:
        fields = dict(row["fields"])
        if row["kind"] == "begin":
            return AttemptRow(**fields)
        ran = fields.pop("ran", None)
        return AttemptEnd(**fields, ran=None if ran is None else RunIdentity(**ran))
    except (KeyError, TypeError, ValueError):
        return None


def begun_in(row: Mapping[str, Any]) -> AttemptRow | None:
    """Return the begin of the attempt whose end a line contains; None if the line lacks it."""
    try:
        return AttemptRow(**row["begun"])
    except (KeyError, TypeError):
        return None


def attempts_in(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of attempts in these lines."""
    return len({(row.get("session"), row.get("number")) for row in rows})


# Delivery writes each attempt once, even if it is delivered several times.

# Clocks that are kept in step differ by less, and so do the ways to the server and back.
_SAME_CLOCK_S: Final = 1.0


@dataclass(slots=True)
class DeliveryCount:
    """Count delivered attempts and runs.

    ``left`` maps the path of each undelivered file to the reason. ``writing`` runs are still alive
    and deliver their own files.
    """

    attempts: int = 0
    runs: int = 0
    writing: int = 0
    left: dict[Path, str] = field(default_factory=dict)


def deliver(location: JournalUrl, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write records to a shared journal in one transaction, after migrating older tables.

    Raises:
        JournalError: if the database is unreachable, refuses the write, or is from a newer
            oomguard. Nothing is written then.
    """
    # A run's row and engine are written once, with its first attempt.
    begun, ran = set[str](), dict[str, RunIdentity]()
    with open_server(location) as database, database.transaction():
        prepare(database)
        if rows:
            offset_s = _clock_offset_s(database)
        else:
            offset_s = 0.0
        for row in map(_without_nul, rows):
            session = row.get("session", "")
            record = record_in(row)
            if isinstance(record, AttemptRow):
                write_begin(database, record, offset_s, has_run=session in begun)
                begun.add(session)
            elif record is not None:
                number = row["number"]
                of_run = record.ran
                if of_run == ran.get(session):
                    ended = replace(record, ran=None)
                else:
                    ended = record
                if not write_end(database, session, number, ended, offset_s):
                    first = begun_in(row)
                    # history --keep removed the run while it ran, so begin it again.
                    if first is not None:
                        write_begin(database, first, offset_s)
                        write_end(database, session, number, record, offset_s)
                if of_run is not None:
                    ran[session] = of_run


def deliver_abandoned(
    location: JournalUrl, most: int | None = None, is_over: Callable[[], bool] = lambda: False
) -> DeliveryCount:
    """Deliver the outboxes of runs that have ended, oldest first.

    Args:
        location: the shared journal.
        most: the maximum number of runs; None for all.
        is_over: called after each run; True stops the delivery.

    Raises:
        JournalError: as in ``deliver``.
        OSError: if the files cannot be read.
    """
    done = DeliveryCount()
    with abandoned_outboxes(location.outbox) as files:
        for path, fd in files:
            try:
                rows, _end = read_from(fd, delivered_of(path, fd))
                if rows:
                    deliver(location, rows)
            except ValueError as error:
                done.left[path] = str(error)
                continue
            except JournalError as error:
                if not _is_about_a_record(error):
                    raise
                done.left[path] = str(error)
                continue
            remove(path)
            done.attempts, done.runs = done.attempts + attempts_in(rows), done.runs + bool(rows)
            if done.runs == most or is_over():
                break
    done.writing = sum(path not in done.left for path in waiting(location.outbox))
    return done


def require_tables(location: JournalUrl) -> None:
    """Create or migrate the tables of a shared journal.

    Raises:
        JournalError: if that is not possible.
    """
    deliver(location, ())


def _is_about_a_record(error: JournalError) -> bool:
    """Return whether the database refused only the content of one file."""
    import psycopg

    return isinstance(error.__cause__, (psycopg.DataError, psycopg.IntegrityError))


def _clock_offset_s(database: PostgresDatabase) -> float:
    """Return how far the database's clock is ahead of this machine's, in seconds; 0 if in step."""
    before = now()
    there = database.now()
    offset_s = there - (before + now()) / 2
    if abs(offset_s) >= _SAME_CLOCK_S:
        return offset_s
    return 0.0


def now() -> float:
    """Return the time of this machine's clock."""
    return time.time()


def _without_nul(value: Any) -> Any:
    """Replace the NUL character, which PostgreSQL's text cannot contain."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {_without_nul(key): _without_nul(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_nul(each) for each in value]
    return value
