"""Claim items for one worker with locks that the kernel releases when the worker ends.

All locks are in one file next to the store. An item's claim locks one byte, whose offset is a hash
of the item's key. The file stays empty, so a killed worker leaves nothing to clean up: its items
are free at once. The locks belong to an open file description (F_OFD_SETLK, fcntl(2)). So two calls
in one process exclude each other too, and closing another handle of the file releases nothing.
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

# The first byte is the lock for opening the store; claims use the bytes after it.
_OPENING: Final = 0
_PLACES: Final = 2**62
# An odd number near the golden ratio of the range spreads the computations' bytes of one item.
_STEP: Final = 0x27220A9513FE7D8B
_TAKEN: Final = frozenset({errno.EAGAIN, errno.EACCES})
_open: Final[weakref.WeakSet[Claims]] = weakref.WeakSet()


class Claims:
    """Hold the claims of one call of ``map``; closing releases all of them.

    Args:
        store: the store. The lock file is next to it, with ``.lock`` added to its name.

    Raises:
        StoreError: the lock file cannot be created, or its file system does not support locks.
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
        """Claim an item of a computation; return False if another call has it."""
        try:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _place(computation, item, occurrence))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise self._cannot(error) from None
        return True

    def give_back(self, computation: int, item: bytes, occurrence: int) -> None:
        """Release an item."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _place(computation, item, occurrence))

    def give_back_all(self) -> None:
        """Release all items."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _OPENING + 1, length=0)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Wait until no other call opens the store.

        Creating the store and changing its journal mode must not happen in two calls at once.
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
        """Remove the lock file if this call created it, because its path is not a valid store."""
        if self._is_new:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release everything."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, command: int, kind: int, place: int, length: int = 1) -> None:
        if self._file is not None:
            # struct flock: l_type, l_whence, l_start, l_len (0 means to the end), l_pid, with
            # native alignment.
            fcntl.fcntl(
                self._file, command, struct.pack("hhqqi0q", kind, os.SEEK_SET, place, length, 0)
            )

    def _cannot(self, error: OSError) -> StoreError:
        hint = "give a path in a folder on a local disk: store=PATH"
        return StoreError(
            f"{self._path}: {error.strerror}: oomguard cannot coordinate workers there", hint=hint
        )


def _place(computation: int, item: bytes, occurrence: int) -> int:
    """Return the byte of an item; items that share one only wait for each other."""
    return 1 + (int.from_bytes(item[:8], "little") + computation * _STEP + occurrence) % _PLACES


def _close_in_child() -> None:
    """Close the files in a forked child, which would otherwise keep the items claimed."""
    for claims in list(_open):
        claims.close()


os.register_at_fork(after_in_child=_close_in_child)
