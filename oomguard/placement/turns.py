"""Whose turn it is: starts that wait for a device, in the order in which they came.

Each has a ticket, a locked file whose name says when it came: it is gone with its process. A ticket tells which devices its command
could use now, and how many it needs. So many of them are kept for it; what is left over may be taken by those behind it, so that a
device is idle only where somebody before waits for one more.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.placement.leases import LeaseFolder
from oomguard.placement.locks import Lock

_BEGINS: Final = "turn-"
# Who waits looks this often; one that has not looked for so long was stopped, and nothing is kept for it.
POLL_S: Final = 0.2
_SILENT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one ticket tells: when it came, how many devices it needs, and which it could use now."""

    name: str
    count: int
    usable: tuple[str, ...]


class Ticket:
    """A place in the queue; None of it is left where the folder takes no files."""

    def __init__(self, folder: LeaseFolder) -> None:
        self.name = f"{_BEGINS}{time.monotonic_ns():020d}-{os.getpid()}"  # of this boot, whatever is done to the clock
        self._lock: Lock | None = None
        if folder.why_off is None:
            with contextlib.suppress(OSError):
                self._lock = folder.lock(self.name)
                self._lock.take()

    def tell(self, count: int, usable: Sequence[str]) -> None:
        """Tell what would be taken now."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.write({"count": count, "usable": list(usable), "at_s": time.monotonic()})

    def close(self) -> None:
        """Leave the queue."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.path.unlink()
            self._lock.close()
            self._lock = None


def waiting_before(folder: LeaseFolder, own: Ticket | None) -> Iterator[Waiting]:
    """Yield those who came before a ticket, or all without one, in their order."""
    if folder.why_off is not None:
        return
    own_name = None if own is None else f"{own.name}.lock"
    try:
        names = sorted(path.name for path in folder.path.glob(f"{_BEGINS}*.lock"))
    except OSError:
        return
    for name in names:
        if own_name is not None and name >= own_name:
            return
        if (told := _told(folder.path / name)) is not None:
            yield told


def _told(path: Path) -> Waiting | None:
    """Read a ticket; None for one whose process is gone or stopped. What a dead one left is removed where that is permitted."""
    try:
        lock = Lock(path) if path.exists() else None
        if lock is None:
            return None
        with contextlib.closing(lock):
            if not lock.is_taken():
                path.unlink()
                return None
            told = lock.read()
    except OSError:
        return None
    count, usable, at_s = told.get("count"), told.get("usable"), told.get("at_s")
    if not (isinstance(count, int) and isinstance(usable, list) and isinstance(at_s, (int, float))):
        return None
    if time.monotonic() - at_s > _SILENT_S:
        return None
    return Waiting(path.name, count, tuple(str(key) for key in usable))


def kept_for(waiting: Iterator[Waiting], free: Collection[str]) -> dict[str, str]:
    """Return which free devices are kept for whom: for each, as many as it needs of those it could use."""
    kept: dict[str, str] = {}
    for one in waiting:
        usable = [key for key in one.usable if key in free and key not in kept]
        kept |= dict.fromkeys(usable[: one.count], one.name)
    return kept
