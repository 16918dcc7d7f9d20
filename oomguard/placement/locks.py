"""One file that one open description locks, and the kernel unlocks when its process is gone, however it ends.

The locks are those of an open file (F_OFD_SETLK, fcntl(2)): who looks whether one is held (F_OFD_GETLK) takes nothing, so a look never
gets in the way of a start. The file's text tells who holds it, and is believed only while it is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import time
from pathlib import Path
from typing import Any, Final

_TAKEN: Final = frozenset({errno.EAGAIN, errno.EACCES})
_MOST_BYTES: Final = 1 << 16
# Another user's start locks the same file.
_MODE: Final = 0o666
_PAUSE_S: Final = 0.005


class Lock:
    """An open file, locked or not.

    Args:
        path: the file; it is made where it is not there.

    Raises:
        OSError: it cannot be made or opened, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:  # without O_CREAT first: the kernel refuses that for another user's file in a folder like /tmp
            self._file = os.open(path, flags)
        except FileNotFoundError:
            self._file = os.open(path, flags | os.O_CREAT, _MODE)
            with contextlib.suppress(OSError):  # whatever the umask says
                os.fchmod(self._file, _MODE)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise OSError(errno.EINVAL, "is no regular file", str(path))

    def take(self) -> bool:
        """Lock it; return False where another one has it.

        Raises:
            OSError: the file system has no locks.
        """
        try:
            self._control(fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise
        return True

    def take_within(self, limit_s: float) -> bool:
        """Lock it, and wait so long at most; return whether it is locked. Raises as ``take``."""
        until_s = time.monotonic() + limit_s
        while not self.take():
            if time.monotonic() > until_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def is_taken(self) -> bool:
        """Return whether another open description has it locked. Raises as ``take``."""
        answer = self._control(fcntl.F_OFD_GETLK, fcntl.F_WRLCK)
        return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)

    def write(self, told: dict[str, Any]) -> None:
        """Tell who holds it, and why."""
        text = json.dumps(told).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)

    def read(self) -> dict[str, Any]:
        """Return what its holder told; empty where it told nothing that can be read."""
        try:
            found = json.loads(os.pread(self._file, _MOST_BYTES, 0))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Unlock it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _control(self, command: int, kind: int) -> bytes:
        # struct flock: l_type, l_whence, l_start, l_len (0: to the end), l_pid, each at its own alignment.
        return fcntl.fcntl(self._file, command, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))
