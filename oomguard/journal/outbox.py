"""A run's outbox: a file of this machine that holds its records until the shared journal has them.

One file per run, one JSON line per record. When a call returns, its line is in the kernel: it
survives the death of the process, but not a power failure. The writer locks its file for as long as
it lives; any process may deliver a file that is not locked. A last line without an end belongs to a
call that never returned. A second file says how far the first is delivered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.core.files import make_folder
from oomguard.journal.record import Ended, Ran, Record
from oomguard.report.json import json_line, plain_value

FORM: Final = 1
_SURROGATE: Final = "\\ud"  # how json_line writes half a character


class Outbox:
    """The file of one run that writes.

    Args:
        folder: ``JournalUrl.outbox``; it is created.
        session: the run's name in the journal.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, folder: Path, session: str) -> None:
        make_folder(folder, 0o700)
        self.path = folder / f"{session}.jsonl"
        self.fd = _locked(self.path)
        self.path.with_suffix(".delivered").touch(0o600)

    def begin(self, record: Record) -> None:
        """Write that an attempt begins; raises OSError if the disk is full or gone."""
        self._append(
            {
                "kind": "begin",
                "session": record.session,
                "number": record.number,
                "fields": _fields(record),
            }
        )

    def end(self, begun: Record, ended: Ended, *, in_full: bool = False) -> None:
        """Write how an attempt ended, ``in_full`` also how it began; may raise as ``begin``."""
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
        if os.write(self.fd, line) != len(
            line
        ):  # the disk is full: half a line would spoil the next one
            os.ftruncate(self.fd, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    @property
    def undelivered(self) -> list[dict[str, Any]]:
        """The records that are not known to be delivered."""
        return read_from(self.fd, delivered_of(self.path, self.fd))[0]

    def close(self, *, is_delivered: bool) -> None:
        """Unlock the file; it is removed if all of it is delivered."""
        if is_delivered:
            remove(self.path)
        os.close(self.fd)


def note_delivered(path: Path, end: int) -> None:
    """Write down that a file is delivered up to this byte, unless the file is gone."""
    with contextlib.suppress(OSError):  # then it is delivered again, which changes nothing
        fd = os.open(path.with_suffix(".delivered"), os.O_WRONLY)
        try:
            os.pwrite(fd, b"%020d" % end, 0)
        finally:
            os.close(fd)


def delivered_of(path: Path, fd: int) -> int:
    """Return up to which byte a file is known to be delivered."""
    with contextlib.suppress(OSError, ValueError):
        end = int(path.with_suffix(".delivered").read_bytes())
        if 0 <= end <= os.fstat(fd).st_size:
            return end
        return 0
    return 0


def remove(path: Path) -> None:
    """Remove a file that is delivered."""
    path.unlink(missing_ok=True)
    path.with_suffix(".delivered").unlink(missing_ok=True)


def _locked(path: Path) -> int:
    """Create a file and lock it, again if someone removed it in between because it was empty."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        os.close(fd)


@contextlib.contextmanager
def left_behind(folder: Path) -> Iterator[Iterator[tuple[Path, int]]]:
    """Yield path and descriptor of each file whose writer is gone, oldest first, locked
    meanwhile.
    """

    def each() -> Generator[tuple[Path, int], None, None]:
        for path in waiting(folder):
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:  # another process has delivered it
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
    """Return the outbox files of a folder, oldest first."""
    found = []
    for path in folder.glob("*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def read_from(fd: int, start: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records after byte ``start``, and the byte behind the last whole line.

    Lines that are not records are skipped.

    Raises:
        ValueError: a later oomguard wrote it, in another form.
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
    """Return a record as a line; its values are seldom not plain, and making them so is slow."""
    try:
        line = json_line(row)
    except (TypeError, ValueError):  # NaN, or a type that JSON does not know
        line = _SURROGATE
    return f"{json_line(plain_value(row)) if _SURROGATE in line else line}\n".encode()


def _fields(record: Record | Ended | Ran) -> dict[str, Any]:
    """Return a record's fields, not copied as ``asdict`` does: that is most of a write's time."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def record_in(row: Mapping[str, Any]) -> Record | Ended | None:
    """Return what a line holds: an attempt that begins, or how one ended; None if it is neither."""
    try:
        fields = dict(row["fields"])
        if row["kind"] == "begin":
            return Record(**fields)
        ran = fields.pop("ran", None)
        return Ended(**fields, ran=None if ran is None else Ran(**ran))
    except (KeyError, TypeError, ValueError):
        return None


def begun_in(row: Mapping[str, Any]) -> Record | None:
    """Return how the attempt began whose end a line holds; None if the line does not say."""
    try:
        return Record(**row["begun"])
    except (KeyError, TypeError):
        return None


def attempts_in(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return how many attempts these lines are about."""
    return len({(row.get("session"), row.get("number")) for row in rows})
