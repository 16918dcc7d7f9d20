"""Who works on which item: locks on one file beside the store, which the kernel releases with the
process that holds them.

An item's claim is the lock of one byte, whose place in the file is a hash of the item's key; the
file itself stays empty. Nothing is written down, so nothing of a killed worker has to be cleaned
up: its items are free at once. The locks are those of an open file (F_OFD_SETLK, fcntl(2)): two
calls in one process exclude each other too, and another use of the file releases none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from oomguard.core.errors import StoreError

# The first byte is for opening the store; claims lie behind it.
_OPENING: Final = 0
_PLACES: Final = 2**62
# An odd number near the golden ratio of the places: one item's bytes under several computations lie
# far apart.
_STEP: Final = 0x27220A9513FE7D8B
_TAKEN: Final = frozenset({errno.EAGAIN, errno.EACCES})
_open: Final[weakref.WeakSet[Claims]] = weakref.WeakSet()


class Claims:
    """The claims of one call of ``map``; closing gives all of them back.

    Args:
        store: the store; the lock file lies beside it, with ``.lock`` at the end of its name.

    Raises:
        StoreError: the lock file cannot be made, or its file system has no locks.
    """

    def __init__(self, store: Path) -> None:
        self._path = store.with_name(f"{store.name}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._is_new = True
        try:
            try:
                self._file: int | None = os.open(self._path, flags | os.O_EXCL, 0o600)
            except FileExistsError:
                self._file = os.open(self._path, flags, 0o600)
                self._is_new = False
        except OSError as error:
            raise self._cannot(error) from None
        _open.add(self)

    def take(self, computation: int, item: bytes, occurrence: int) -> bool:
        """Claim an item of a computation; return False where another call has it."""
        try:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _place(computation, item, occurrence))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise self._cannot(error) from None
        return True

    def give_back(self, computation: int, item: bytes, occurrence: int) -> None:
        """Let others have an item."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _place(computation, item, occurrence))

    def give_back_all(self) -> None:
        """Let others have every item."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _OPENING + 1, length=0)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Wait until no other call opens the store: making it, and changing how it keeps its
        journal, is for one at a time.
        """
        try:
            self._lock(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, _OPENING)
        except OSError as error:
            raise self._cannot(error) from None
        try:
            yield
        finally:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _OPENING)

    def remove_new(self) -> None:
        """Remove the lock file where this call made it: its path is refused as a store."""
        if self._is_new:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give everything back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, command: int, kind: int, place: int, length: int = 1) -> None:
        if self._file is not None:
            # struct flock: l_type, l_whence, l_start, l_len (0: to the end), l_pid, each at its own
            # alignment.
            fcntl.fcntl(
                self._file, command, struct.pack("hhqqi0q", kind, os.SEEK_SET, place, length, 0)
            )

    def _cannot(self, error: OSError) -> StoreError:
        hint = "give a path in a folder of a local disk: store=PATH"
        return StoreError(
            f"{self._path}: {error.strerror}: who works on which item cannot be kept", hint=hint
        )


def _place(computation: int, item: bytes, occurrence: int) -> int:
    """Return the byte that stands for an item, by its digest. Two items of one byte only wait for
    each other.
    """
    return 1 + (int.from_bytes(item[:8], "little") + computation * _STEP + occurrence) % _PLACES


def _close_in_child() -> None:
    """Close the files in a fork of this process: an item would stay claimed for as long as the fork
    lives.
    """
    for claims in list(_open):
        claims.close()


os.register_at_fork(after_in_child=_close_in_child)
