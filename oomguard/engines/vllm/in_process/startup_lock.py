"""Whose turn it is to start an engine: two that start at once on one device measure each other's
memory.

A lock of this user's on each device, held while a guarded start goes on, in every process. Not
longer: an engine that was forked meanwhile holds the descriptor too, so the lock is given up and
not only closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from oomguard.core.log import get_logger

# Which devices a process sees, in the order in which the platforms ask.
_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_ALL: Final = "all"
# A model's weights may take minutes to load; a start that hangs is not to keep the others from
# theirs.
WAITS_S: Final = 900.0
_LOOKS_EVERY_S: Final = 0.2
# How often a lock is tried anew that somebody removes at the same time.
_TRIES: Final = 50


@contextlib.contextmanager
def turn(
    folder: Path | None = None,
    *,
    waits_s: float = WAITS_S,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Wait until no other guarded start goes on that sees one of these devices, and hold that while
    the block runs.

    Do without where no lock can be made. After ``waits_s`` seconds the start goes on all the same,
    and says so; once ``stop`` is true, at once.
    """
    held: list[_Lock] = []
    try:
        until_s = time.monotonic() + waits_s
        for name, kind in _locks(os.environ):
            place = _private(Path(tempfile.gettempdir()) if folder is None else folder)
            if place is None:
                lock = None
            else:
                lock = _Lock(place / name, kind)
            if lock is None or not lock.take(until_s, stop):
                break
            held.append(lock)
        yield
    finally:
        for lock in reversed(held):
            lock.give_up()


class _Lock:
    """A lock on a file that is there only while somebody holds it or waits for it."""

    def __init__(self, path: Path, kind: int) -> None:
        self._path = path
        self._kind = kind
        self._descriptor = -1

    def take(self, until_s: float, stop: Callable[[], bool]) -> bool:
        """Take it; return whether it is held: not where the file cannot be made, nor where the time
        is over or ``stop`` is true.
        """
        is_told = False
        while True:
            try:
                if self._is_taken():
                    return True
            except OSError:
                return False
            if stop():
                return False
            if time.monotonic() > until_s:
                get_logger().warning(
                    "another engine still starts", then="this one starts beside it"
                )
                return False
            if not is_told:
                get_logger().info(
                    "waiting for another engine to start",
                    because="two at once measure each other's memory",
                )
                is_told = True
            time.sleep(_LOOKS_EVERY_S)

    def _is_taken(self) -> bool:
        """Take it, unless somebody holds it; who held it before has removed the file that was
        locked. Raises OSError.
        """
        for _ in range(_TRIES):
            try:
                descriptor = os.open(
                    self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except FileNotFoundError:  # who gives a lock up removes the folder with it
                with contextlib.suppress(FileExistsError):
                    self._path.parent.mkdir(mode=0o700)
                continue
            try:
                fcntl.flock(descriptor, self._kind | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                    self._descriptor = descriptor
                    descriptor = -1
                    return True
            except BlockingIOError:
                return False
            except FileNotFoundError:
                continue
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        return False

    def give_up(self) -> None:
        """Remove the file where nobody else holds it, and unlock it: a fork of this process may
        hold the descriptor too.
        """
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink()
            self._path.parent.rmdir()
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def _locks(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return each lock and how it is held: those who see some devices exclude each other by device,
    and one who sees all excludes all.
    """
    named = next((value for name in _VARIABLES if (value := environ.get(name, "").strip())), "")
    devices = sorted({part.strip() for part in named.split(",") if part.strip()})
    if not devices:
        return [(f"{_ALL}.lock", fcntl.LOCK_EX)]
    return [
        (f"{_ALL}.lock", fcntl.LOCK_SH),
        *((f"{_file_name(device)}.lock", fcntl.LOCK_EX) for device in devices),
    ]


def _file_name(device: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in device)[:100]


def _private(folder: Path) -> Path | None:
    """Return a folder that only this user writes to; None where no such folder can be made."""
    place = folder / f"oomguard-starts-{os.geteuid()}"
    found = None
    for _ in range(_TRIES):  # who gives a lock up removes the folder with it
        try:
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
            found = place.lstat()
            break
        except FileNotFoundError:
            continue
        except OSError:
            return None
    if found is None:
        return None
    is_ours = (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    )
    if is_ours:
        return place
    return None
