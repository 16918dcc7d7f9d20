"""Lock a rank of a folder, so that a second process cannot take the same rank.

Two jobs that start on one folder at the same time may mix: each may hold some ranks. So a refused
process leaves a note. A process that holds a rank continues only if its job is known. That is so if
all ranks were there for a while, or all holders are of one kind and the refused process is of
another. Otherwise the holder ends too, because the rank that it waits for belongs to the other job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.cluster.ranks.messages import MessageFolder
from oomguard.core.errors import UsageError

# Jobs that start within this time of each other may have mixed.
_TOGETHER_S: Final = 10.0
# Do not wait longer for a slow file system, because the command has to start.
_ANSWER_S: Final = 2.0
_TRIES: Final = 5
_PAUSE_S: Final = 0.02
_REFUSED: Final = ".refused"
_SCHEDULED_JOB: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_FIX: Final = (
    "give each job its own folder, such as --rendezvous DIR/$SLURM_JOB_ID, and each rank its own "
    "number"
)


class ContestedError(OSError):
    """Report that two jobs use one folder, and the owner of each rank is unknown."""


class RankLock:
    """Hold the lock of one rank; the kernel releases it when the process ends.

    Args:
        folder: the folder where the ranks meet.
        rank: the number of this rank.
        size: the number of ranks.
        leaves_word: whether to leave a note for the holders if this process is refused.
    """

    def __init__(self, folder: Path, rank: int, size: int, *, leaves_word: bool = True) -> None:
        self._folder = folder
        self._rank = rank
        self._size = size
        self._leaves_word = leaves_word
        self._lock: int | None = None

    def take(self) -> None:
        """Lock the rank, if the file system answers in time.

        Raises:
            UsageError: another process has the rank.
        """
        found: list[Mapping[str, Any] | None] = []
        thread = threading.Thread(
            target=lambda: found.append(self._taken()), name="oomguard-claim", daemon=True
        )
        thread.start()
        thread.join(_ANSWER_S)
        if found:
            other = found[0]
        else:
            other = None
        if other is not None:
            who = f"pid {other.get('pid', '?')} on {other.get('host', '?')}"
            raise UsageError(
                f"another process is already rank {self._rank} in {self._folder.parent}: {who}",
                hint=_FIX,
            )

    def contested(self) -> str | None:
        """Return why the ranks of this job are ambiguous, or None if they are clear.

        Raises:
            OSError: the folder cannot be read.
        """
        if self._lock is None:
            return None
        refused = list(self._claims.glob(f"*{_REFUSED}"))
        if not refused:
            return None
        own_s = os.fstat(self._lock).st_mtime
        holders = [path for path in self._claims.iterdir() if path.name.isdigit()]
        kinds = {str(_read_record(path).get("kind")) for path in holders}
        latest_s = max((path.stat().st_mtime for path in holders), default=own_s)
        for path in refused:
            at_s = path.stat().st_mtime
            if at_s < own_s - _TOGETHER_S:  # a note from an earlier job
                continue
            is_another = len(kinds) == 1 and str(_read_record(path).get("kind")) not in kinds
            if len(holders) == self._size and (is_another or at_s > latest_s + _TOGETHER_S):
                continue
            return (
                f"another job started in {self._folder.parent} at the same time, also as rank "
                f"{path.stem}: {_FIX}"
            )
        return None

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove_where_last(self) -> None:
        """Remove the folder of ranks that never met, if no other process holds a rank."""
        with contextlib.suppress(OSError):
            if self.is_last():
                MessageFolder(self._folder).remove()

    def is_last(self) -> bool:
        """Return whether no other process holds a rank of the folder."""
        for path in self._claims.glob("*"):
            if not path.name.isdigit() or path.name == str(self._rank):
                continue
            with contextlib.closing(path.open("rb")) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
        return True

    @property
    def _claims(self) -> Path:
        return self._folder / "claims"

    def _taken(self) -> Mapping[str, Any] | None:
        """Lock the rank; return its other holder, or None without one or if it is unknown."""
        own = {"kind": _kind(), "pid": os.getpid(), "host": socket.gethostname()}
        try:
            MessageFolder(self._folder)
            self._claims.mkdir(mode=0o700, exist_ok=True)
            for _ in range(_TRIES):
                lock = os.open(self._claims / str(self._rank), os.O_RDWR | os.O_CREAT, 0o600)
                if _is_locked(lock) and self._is_current(lock):
                    os.ftruncate(lock, 0)
                    os.write(lock, json.dumps(own).encode())
                    self._lock = lock
                    (self._claims / f"{self._rank}{_REFUSED}").unlink(missing_ok=True)
                    return None
                os.close(lock)
                time.sleep(_PAUSE_S)  # the last rank of an earlier job checks or removes the folder
            if self._leaves_word:
                (self._claims / f"{self._rank}{_REFUSED}").write_text(json.dumps(own))
            return _read_record(self._claims / str(self._rank))
        except OSError:  # no folder, or no support for locks
            return None

    def _is_current(self, lock: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(lock), (self._claims / str(self._rank)).stat())
        return False


def _is_locked(file: int) -> bool:
    """Lock a file, or return False if another process holds the lock.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_record(path: Path) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if isinstance(record, dict):
            return record
        return {}
    return {}


def _kind() -> str:
    """Return an ID that processes of one job mostly share, and those of two jobs mostly do not."""
    scheduled = next((os.environ[name] for name in _SCHEDULED_JOB if name in os.environ), "")
    with contextlib.suppress(OSError):
        return json.dumps([str(Path.cwd()), os.getsid(0), scheduled])
    return scheduled
