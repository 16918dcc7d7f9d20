"""Lease devices with one lock file per device, in a folder that all users share.

A device belongs to the machine, so its lease must be visible to every user. The folder is
/tmp/oomguard-leases, sticky like /tmp. TMPDIR is not suitable because schedulers set it for each
job. Other users cannot see XDG_RUNTIME_DIR.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.core.process import pid_of_run

# Locks belong to an open file description (F_OFD_SETLK, fcntl(2)). The kernel releases them when
# the process ends. F_OFD_GETLK only looks, so it never blocks another start. The file's text names
# the holder; oomguard believes it only while the file is locked.

# POSIX allows both for a lock that another process holds.
_TAKEN: Final = frozenset({errno.EAGAIN, errno.EACCES})
# Any user may write into the shared folder.
_MOST_BYTES: Final = 1 << 16
# Other users must be able to lock the same file.
_MODE: Final = 0o666
# A process holds the gate only for a moment, so a short pause is enough.
_PAUSE_S: Final = 0.005


class LockFile:
    """Hold an open lock file, locked or not.

    Args:
        path: the file. It is created if it does not exist.

    Raises:
        OSError: the file cannot be created or opened, or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        # Try without O_CREAT first: in a sticky folder the kernel refuses O_CREAT for another
        # user's file.
        try:
            self._file = os.open(path, flags)
        except FileNotFoundError:
            self._file = os.open(path, flags | os.O_CREAT, _MODE)
            # The umask may have removed bits.
            with contextlib.suppress(OSError):
                os.fchmod(self._file, _MODE)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise OSError(errno.EINVAL, "is not a regular file", str(path))

    def take(self) -> bool:
        """Lock the file, or return False if another process holds the lock.

        Raises:
            OSError: the file system does not support locks.
        """
        try:
            self._control(fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise
        return True

    def take_within(self, limit_s: float) -> bool:
        """Lock the file within a time limit in seconds; return whether that succeeded.

        Raises:
            OSError: the file system does not support locks.
        """
        until_s = time.monotonic() + limit_s
        while not self.take():
            if time.monotonic() > until_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def is_taken(self) -> bool:
        """Return whether another process holds the lock.

        Raises:
            OSError: the file system does not support locks.
        """
        answer = self._control(fcntl.F_OFD_GETLK, fcntl.F_WRLCK)
        return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)

    def write(self, record: dict[str, Any]) -> None:
        """Write who holds the lock, and why."""
        text = json.dumps(record).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)

    def read(self) -> dict[str, Any]:
        """Return the holder's record, or an empty dictionary if it is unreadable."""
        try:
            found = json.loads(os.pread(self._file, _MOST_BYTES, 0))
        except (OSError, ValueError, RecursionError):
            # The lock alone decides; a broken record only loses its description.
            return {}
        if isinstance(found, dict):
            return found
        return {}

    def close(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _control(self, command: int, kind: int) -> bytes:
        # struct flock: l_type, l_whence, l_start, l_len (0 means to the end), l_pid, with native
        # alignment.
        return fcntl.fcntl(self._file, command, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))


# All users share it on purpose. oomguard opens its files as untrusted input.
DEFAULT_FOLDER: Final = Path("/tmp/oomguard-leases")  # noqa: S108
MOUNTS: Final = Path("/proc/self/mountinfo")
_GATE: Final = "gate.lock"
# A start holds the gate for milliseconds while it chooses. If that process is stopped (SIGSTOP),
# others stop waiting after this time.
GATE_LIMIT_S: Final = 5.0
# Network file systems: a server keeps their locks. It may not answer, or may drop locks after a
# timeout.
_OF_SERVERS: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "9p",
        "afs",
        "ceph",
        "lustre",
        "glusterfs",
        "beegfs",
        "gpfs",
        "fuse.sshfs",
        "fuse.glusterfs",
    }
)
# A command in a message should stay on a line or two.
_SHOWN_CHARS: Final = 200
_OFF_LIMITS: Final = re.compile(r"[^\w.-]")


@dataclass(frozen=True, slots=True)
class Lease:
    """Describe a lease from its holder's record; an unknown field is None."""

    pid: int | None
    command: str | None
    since_s: float | None
    until: str | None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Lease:
        """Read a holder's record, which any user may have written."""
        pid = record.get("pid")
        command = record.get("command")
        since = record.get("since_s")
        until = record.get("until")
        return cls(
            pid if isinstance(pid, int) else None,
            command[:_SHOWN_CHARS] if isinstance(command, str) else None,
            float(since) if isinstance(since, (int, float)) else None,
            until if until in {"start", "job"} else None,
        )


class LeaseFolder:
    """Manage the leases of one folder.

    Args:
        path: the folder. None (default): the folder that all users share.
        makes: whether to create a missing folder. If False, a missing folder means that there are
            no leases.

    Attributes:
        why_off: the reason why leases do not work here, or None if they work.
    """

    def __init__(self, path: Path | None = None, *, makes: bool = True) -> None:
        if path is None:
            self.path = DEFAULT_FOLDER
        else:
            self.path = path
        self.why_off = self._problem(makes=makes)

    def _problem(self, *, makes: bool) -> str | None:
        try:
            if not makes and not self.path.exists():
                return None
            # Another user's process may create the folder at the same time.
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o1777)
                # The umask may have removed bits.
                self.path.chmod(0o1777)
            status = self.path.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                return f"{self.path} is not a folder"
            shared = status.st_mode & 0o002
            if shared and not status.st_mode & stat.S_ISVTX:
                return (
                    f"every user can remove other users' files in {self.path}: chmod +t {self.path}"
                )
            if (kind := file_system_of(self.path)) in _OF_SERVERS:
                return (
                    f"{self.path} is on {kind}, a network file system whose locks are not reliable"
                )
            lock = LockFile(self.path / _GATE)
            lock.is_taken()
            lock.close()
        except OSError as error:
            return f"{self.path}: {error.strerror or error}"
        return None

    def file(self, name: str) -> Path:
        """Return the path of a lock file."""
        return self.path / f"{_OFF_LIMITS.sub('_', name)}.lock"

    def lock(self, name: str) -> LockFile:
        """Open a lock file.

        Raises:
            OSError: the file cannot be opened.
        """
        return LockFile(self.file(name))

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        """Hold the gate, so that only one start chooses devices at a time."""
        if self.why_off is not None:
            yield
            return
        lock = LockFile(self.path / _GATE)
        try:
            lock.take_within(GATE_LIMIT_S)
            yield
        finally:
            lock.close()

    def holders(self, keys: Iterable[str]) -> dict[str, Lease]:
        """Return the lease of each device that has one."""
        found = {}
        for key in keys if self.why_off is None else ():
            with contextlib.suppress(OSError):
                if not self.file(key).exists():
                    continue
                with contextlib.closing(self.lock(key)) as lock:
                    if lock.is_taken():
                        found[key] = Lease.from_record(lock.read())
        return found

    def take(self, keys: Iterable[str], command: str, until: str) -> dict[str, LockFile] | None:
        """Lease all these devices, or none if another process has one of them.

        Args:
            keys: the lease names of the devices.
            command: the command that the leases are for.
            until: ``start`` or ``job``.

        Returns:
            The locks by device, or None if another process has a device.
        """
        taken: dict[str, LockFile] = {}
        for key in keys if self.why_off is None else ():
            try:
                lock = self.lock(key)
                is_ours = lock.take()
            except OSError as error:
                self.why_off = f"{self.path}: {error.strerror or error}"
                break
            if not is_ours:
                for other in (lock, *taken.values()):
                    other.close()
                return None
            lock.write(
                {
                    "pid": pid_of_run(),
                    "command": command[:_SHOWN_CHARS],
                    "since_s": time.time(),
                    "until": until,
                }
            )
            taken[key] = lock
        return taken


def file_system_of(path: Path, mounts: Path | None = None) -> str | None:
    """Return the type of the file system that holds a path, or None if it is unknown."""
    try:
        text = (mounts or MOUNTS).read_text(encoding="utf-8", errors="replace")
        device = path.stat().st_dev
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in text.splitlines():
        before, _, behind = line.partition(" - ")
        if before.split(" ")[2:3] == [wanted]:
            return behind.split(" ")[0]
    return None
