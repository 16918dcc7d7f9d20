"""Follow a log that is still written, as ``tail -F`` does: it may not exist yet, be cut, or be
replaced.
"""

from __future__ import annotations

import enum
import io
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.core.errors import InputError
from oomguard.scan.source import CHUNK_BYTES, shown

POLL_S: Final = 0.2
QUIET_S: Final = 1.0


class LogChange(enum.Enum):
    """What happened to a followed log."""

    DATA = "more bytes"
    QUIET = "nothing came for a while after the last bytes"
    WAITING = "it does not exist yet"
    TRUNCATED = "it was cut: what follows is from its new start"
    REPLACED = "another file took its name: what follows is from the start of that one"


@dataclass(frozen=True, slots=True)
class Event:
    """One change; ``data`` holds the bytes of a ``DATA``."""

    change: LogChange
    data: bytes = b""


def follow(path: str, *, poll_s: float = POLL_S, quiet_s: float = QUIET_S) -> Iterator[Event]:
    """Yield the events of the file at ``path``, without end. A removed file is read on until
    another takes its name.

    Args:
        path: the file, which may not exist yet.
        poll_s: seconds between two looks at the file.
        quiet_s: seconds without bytes after which ``QUIET`` is told, once.

    Raises:
        InputError: the file exists and cannot be read.
    """
    raw = None
    told = False
    while raw is None:
        try:
            raw = io.FileIO(path)
        except FileNotFoundError:
            if not told:
                yield Event(LogChange.WAITING)
                told = True
            time.sleep(poll_s)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{shown(path)}: {getattr(error, 'strerror', None) or error}"
            ) from None
    try:
        last_s: float | None = None
        while True:
            if data := raw.read(CHUNK_BYTES):
                last_s = time.monotonic()
                yield Event(LogChange.DATA, data)
                continue
            change, newer = _changed(raw, path)
            # Bytes written between the last read and the change belong to the old file.
            if change is not None and change is not LogChange.TRUNCATED:
                while data := raw.read(CHUNK_BYTES):
                    yield Event(LogChange.DATA, data)
            if newer is not None:
                raw.close()
                raw = newer
            if change is not None:
                last_s = None
                yield Event(change)
                continue
            if last_s is not None and time.monotonic() - last_s >= quiet_s:
                last_s = None
                yield Event(LogChange.QUIET)
            time.sleep(poll_s)
    finally:
        raw.close()


def _changed(raw: io.FileIO, path: str) -> tuple[LogChange | None, io.FileIO | None]:
    """Return whether the open file was cut or another took its name; the other one is returned
    open.
    """
    own = os.fstat(raw.fileno())
    try:
        named = Path(path).stat()
        if (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            return LogChange.REPLACED, io.FileIO(path)
    except OSError:  # gone or unreadable for now: read the open one on
        return None, None
    if own.st_size < raw.tell():
        raw.seek(0)
        return LogChange.TRUNCATED, None
    return None, None


def follow_stream(raw: io.FileIO, *, quiet_s: float = QUIET_S) -> Iterator[Event]:
    """Yield the events of a pipe or of standard input until it ends: bytes as they come, and the
    quiet after them.
    """
    waiting = False
    while True:
        readable, _, _ = select.select([raw], [], [], quiet_s if waiting else None)
        if not readable:
            waiting = False
            yield Event(LogChange.QUIET)
            continue
        data = raw.read(CHUNK_BYTES)
        if data is None:
            continue
        if not data:
            return
        waiting = True
        yield Event(LogChange.DATA, data)
