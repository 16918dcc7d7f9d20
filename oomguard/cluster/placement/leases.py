"""Leases of devices: a lock file for each, in a folder that all users of the machine share. Who
starts on a device has its lease.

A device belongs to the machine, not to a user, so the folder does too: /tmp/oomguard-leases, sticky
as /tmp is. It is not below TMPDIR, which a scheduler sets for each job, nor below XDG_RUNTIME_DIR,
which other users do not see.
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

from oomguard.core.process_state import pid_of_run

# One file that one open description locks, and the kernel unlocks when its process is gone, however
# it ends.
#
# The locks are those of an open file (F_OFD_SETLK, fcntl(2)): who looks whether one is held
# (F_OFD_GETLK) takes nothing, so a look never gets in the way of a start. The file's text tells who
# holds it, and is believed only while it is locked.

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
        # without O_CREAT first: the kernel refuses that for another user's file in a folder like
        # /tmp
        try:
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
        if isinstance(found, dict):
            return found
        return {}

    def close(self) -> None:
        """Unlock it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _control(self, command: int, kind: int) -> bytes:
        # struct flock: l_type, l_whence, l_start, l_len (0: to the end), l_pid, each at its own
        # alignment.
        return fcntl.fcntl(self._file, command, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))


# shared on purpose, and its files are opened as a stranger's
DEFAULT_FOLDER: Final = Path("/tmp/oomguard-leases")  # noqa: S108
MOUNTS: Final = Path("/proc/self/mountinfo")
_GATE: Final = "gate.lock"
# The gate is held while one start chooses: milliseconds. One that was stopped there (SIGSTOP) is
# not waited for longer.
GATE_LIMIT_S: Final = 5.0
# File systems whose locks a server keeps: it may not answer, and it releases them by a timeout.
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
_SHOWN_CHARS: Final = 200
_OFF_LIMITS: Final = re.compile(r"[^\w.-]")


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that somebody holds: by what it told of itself, None for what it did not."""

    pid: int | None
    command: str | None
    since_s: float | None
    until: str | None

    @classmethod
    def told(cls, told: Mapping[str, Any]) -> Lease:
        """Read what the holder wrote; anybody may have written anything."""
        pid, command, since, until = (
            told.get(name) for name in ("pid", "command", "since_s", "until")
        )
        return cls(
            pid if isinstance(pid, int) else None,
            command[:_SHOWN_CHARS] if isinstance(command, str) else None,
            float(since) if isinstance(since, (int, float)) else None,
            until if until in {"start", "job"} else None,
        )


class LeaseFolder:
    """The folder of leases; ``why_off`` says why none can be held, None where they can.

    Args:
        path: the folder, None for the one that all users share.
        makes: whether to make it where it is not there; else nobody has a lease then.
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
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o1777)
                self.path.chmod(0o1777)  # whatever the umask says
            status = self.path.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                return f"{self.path} is no folder"
            shared = status.st_mode & 0o002
            if shared and not status.st_mode & stat.S_ISVTX:
                return f"{self.path} lets every user remove the others' files: chmod +t {self.path}"
            if (kind := file_system_of(self.path)) in _OF_SERVERS:
                return f"{self.path} is on {kind}, whose locks a server keeps"
            lock = Lock(self.path / _GATE)
            lock.is_taken()
            lock.close()
        except OSError as error:
            return f"{self.path}: {error.strerror or error}"
        return None

    def file(self, name: str) -> Path:
        """Return where the lock file of a name lies."""
        return self.path / f"{_OFF_LIMITS.sub('_', name)}.lock"

    def lock(self, name: str) -> Lock:
        """Open it. Raises OSError."""
        return Lock(self.file(name))

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        """Wait until no other start chooses."""
        if self.why_off is not None:
            yield
            return
        lock = Lock(self.path / _GATE)
        try:
            lock.take_within(GATE_LIMIT_S)
            yield
        finally:
            lock.close()

    def holders(self, keys: Iterable[str]) -> dict[str, Lease]:
        """Return who holds which of these devices; those that nobody holds are left out."""
        found = {}
        for key in keys if self.why_off is None else ():
            with contextlib.suppress(OSError):
                if not self.file(key).exists():
                    continue
                with contextlib.closing(self.lock(key)) as lock:
                    if lock.is_taken():
                        found[key] = Lease.told(lock.read())
        return found

    def take(self, keys: Iterable[str], command: str, until: str) -> dict[str, Lock] | None:
        """Take the leases of all these devices, or none where another one has one of them; return
        the locks by device.
        """
        taken: dict[str, Lock] = {}
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
    """Return the kind of file system that a path lies on, None where it is not told."""
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
