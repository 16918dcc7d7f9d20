"""Follow a growing log like ``tail -F``: it may not exist yet, or be truncated or replaced."""

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
from oomguard.scan.source import CHUNK_BYTES, printable_path

POLL_S: Final = 0.2
QUIET_S: Final = 1.0


class LogChange(enum.Enum):
    """Name what happened to a followed log."""

    DATA = "more bytes"
    QUIET = "no new bytes for a while"
    WAITING = "the file does not exist yet"
    TRUNCATED = "the file was truncated; oomguard continues at its new start"
    REPLACED = "another file replaced it; oomguard continues at the start of that file"


@dataclass(frozen=True, slots=True)
class Event:
    """Hold one change; ``data`` has the bytes of a ``DATA``."""

    change: LogChange
    data: bytes = b""


def follow(path: str, *, poll_s: float = POLL_S, quiet_s: float = QUIET_S) -> Iterator[Event]:
    """Yield the events of the file at ``path``, endlessly.

    A removed file is read until another one has its name.

    Args:
        path: the file, which may not exist yet.
        poll_s: seconds between two checks of the file.
        quiet_s: seconds without bytes before one ``QUIET``; None for never.

    Raises:
        InputError: the file exists but is unreadable.
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
                f"{printable_path(path)}: {getattr(error, 'strerror', None) or error}"
            ) from None
    try:
        last_s: float | None = None
        while True:
            if data := raw.read(CHUNK_BYTES):
                last_s = time.monotonic()
                yield Event(LogChange.DATA, data)
                continue
            change, newer = _changed(raw, path)
            # Bytes between the last read and the change belong to the old file.
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
    """Return whether the open file was truncated or replaced, and the opened replacement."""
    own = os.fstat(raw.fileno())
    try:
        named = Path(path).stat()
        if (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            return LogChange.REPLACED, io.FileIO(path)
    except OSError:  # gone or unreadable for now: continue with the open one
        return None, None
    if own.st_size < raw.tell():
        raw.seek(0)
        return LogChange.TRUNCATED, None
    return None, None


def follow_stream(raw: io.FileIO, *, quiet_s: float = QUIET_S) -> Iterator[Event]:
    """Yield the events of a pipe or standard input until it ends, including quiet periods."""
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
