"""Who is which rank of a folder: a second process that comes as the same rank is of another job,
and is refused.

Two jobs that begin on one folder at once may mix: one has claimed rank 0, the other rank 1. Who is
refused leaves word, and who has a rank goes on only where its job is known: all ranks are claimed
by processes of one kind and the refused one is of another, or all had been there for a while. Else
it ends too, since the rank that it would wait for is not there.
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

from oomguard.cluster.ranks.messages import Folder
from oomguard.core.errors import UsageError

# Jobs that begin within this time of each other may have mixed.
_TOGETHER_S: Final = 10.0
# A file system that takes longer is not waited for: the command has to start.
_ANSWER_S: Final = 2.0
_TRIES: Final = 5
_PAUSE_S: Final = 0.02
_REFUSED: Final = ".refused"
_SCHEDULED_JOB: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_FIX: Final = (
    "give each job a place of its own, such as --rendezvous DIR/$SLURM_JOB_ID, and each of its "
    "ranks another number"
)


class ContestedError(OSError):
    """Two jobs are on one folder, and nothing tells which rank is of which."""


class Claim:
    """A rank of a folder, held while this process lives: the kernel lets go of it with the process.

    Args:
        folder: where the ranks meet.
        rank: this one.
        size: how many there are.
        leaves_word: whether those who are there hear of this process where it is refused.
    """

    def __init__(self, folder: Path, rank: int, size: int, *, leaves_word: bool = True) -> None:
        self._folder = folder
        self._rank = rank
        self._size = size
        self._leaves_word = leaves_word
        self._lock: int | None = None

    def take(self) -> None:
        """Claim the rank, as far as the file system can say in time.

        Raises:
            UsageError: another process has it.
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
                f"another process is rank {self._rank} in {self._folder.parent} already: {who}",
                hint=_FIX,
            )

    def contested(self) -> str | None:
        """Return why this rank cannot know the others: another job came together with it; None
        where it can. Raises OSError.
        """
        if self._lock is None:
            return None
        refused = list(self._claims.glob(f"*{_REFUSED}"))
        if not refused:
            return None
        own_s = os.fstat(self._lock).st_mtime
        holders = [path for path in self._claims.iterdir() if path.name.isdigit()]
        kinds = {str(_told(path).get("kind")) for path in holders}
        latest_s = max((path.stat().st_mtime for path in holders), default=own_s)
        for path in refused:
            at_s = path.stat().st_mtime
            if at_s < own_s - _TOGETHER_S:  # an earlier job's
                continue
            is_another = len(kinds) == 1 and str(_told(path).get("kind")) not in kinds
            if len(holders) == self._size and (is_another or at_s > latest_s + _TOGETHER_S):
                continue
            return (
                f"another job came to {self._folder.parent} at the same time, as rank {path.stem} "
                f"too: {_FIX}"
            )
        return None

    def release(self) -> None:
        """Let go of it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove_where_last(self) -> None:
        """Remove the folder of ranks that have not met, once no other process has a rank of it."""
        with contextlib.suppress(OSError):
            if self.is_last():
                Folder(self._folder).remove()

    def is_last(self) -> bool:
        """Return whether no other process has a rank of the folder."""
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
        """Take it; return who has it, None where nobody else has, or nothing can be known."""
        own = {"kind": _kind(), "pid": os.getpid(), "host": socket.gethostname()}
        try:
            Folder(self._folder)
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
                time.sleep(
                    _PAUSE_S
                )  # an earlier job's last rank looks whether it is the last, or has just removed it
            if self._leaves_word:
                (self._claims / f"{self._rank}{_REFUSED}").write_text(json.dumps(own))
            return _told(self._claims / str(self._rank))
        except OSError:  # no folder, or no locks
            return None

    def _is_current(self, lock: int) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(lock), (self._claims / str(self._rank)).stat())
        return False


def _is_locked(file: int) -> bool:
    """Lock a file; return False where another process has. Raises OSError where the file system has
    no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _told(path: Path) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        told = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if isinstance(told, dict):
            return told
        return {}
    return {}


def _kind() -> str:
    """Return what processes of one job on one host mostly share, and those of two jobs mostly do
    not.
    """
    scheduled = next((os.environ[name] for name in _SCHEDULED_JOB if name in os.environ), "")
    with contextlib.suppress(OSError):
        return json.dumps([str(Path.cwd()), os.getsid(0), scheduled])
    return scheduled
