"""Leases of devices: a lock file for each, in a folder that all users of the machine share. Who starts on a device has its lease.

A device belongs to the machine, not to a user, so the folder does too: /tmp/oomguard-leases, sticky as /tmp is. It is not below
TMPDIR, which a scheduler sets for each job, nor below XDG_RUNTIME_DIR, which other users do not see.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.own_process import pid_of_run
from oomguard.placement.locks import Lock

DEFAULT_FOLDER: Final = Path("/tmp/oomguard-leases")  # noqa: S108 - shared on purpose, and its files are opened as a stranger's
MOUNTS: Final = Path("/proc/self/mountinfo")
_GATE: Final = "gate.lock"
# The gate is held while one start chooses: milliseconds. One that was stopped there (SIGSTOP) is not waited for longer.
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
        pid, command, since, until = (told.get(name) for name in ("pid", "command", "since_s", "until"))
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
        self.path = DEFAULT_FOLDER if path is None else path
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
        """Take the leases of all these devices, or none where another one has one of them; return the locks by device."""
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
            lock.write({"pid": pid_of_run(), "command": command[:_SHOWN_CHARS], "since_s": time.time(), "until": until})
            taken[key] = lock
        return taken


def file_system_of(path: Path, mounts: Path | None = None) -> str | None:
    """Return the kind of file system that a path lies on, None where it is not told."""
    try:
        text, device = (mounts or MOUNTS).read_text(encoding="utf-8", errors="replace"), path.stat().st_dev
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in text.splitlines():
        before, _, behind = line.partition(" - ")
        if before.split(" ")[2:3] == [wanted]:
            return behind.split(" ")[0]
    return None
