"""Let the ranks of one job meet: verify whose messages belong to this job, and detect lost ranks.

The folder may hold messages of an earlier job, and a rank may come late. So each rank shows a
random nonce. Rank 0 lists the nonces that it read. A rank that finds its own nonce in the list
knows that rank 0's message is current, and answers with rank 0's nonce. Rank 0 has then met that
rank. The other ranks trust each other only after rank 0 has met them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.cluster.ranks.messages import MessageFolder, RankMessage, parse_message
from oomguard.core.errors import UsageError

# Every launcher has a rank 0.
LEADER: Final = 0
# A rank on another host is silent if its message has not changed for this long.
BEAT_S: Final = 5.0
# One lost message, or a slow file system, is not a lost rank.
SILENT_S: Final = 6 * BEAT_S


class RankBarrier:
    """Exchange messages with the other ranks.

    Args:
        folder: the folder of messages.
        rank: the number of this rank.
        size: the number of ranks.
        claim: the lock of this rank, or None if it holds none.
    """

    def __init__(
        self, folder: MessageFolder, rank: int, size: int, claim: RankLock | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._folder = folder
        self._claim = claim
        self._lock = threading.Lock()
        self._own = RankMessage(rank, uuid.uuid4().hex, host=host_identity(), pid=own_pid())
        self._written_s = self._beaten_s = 0.0
        self._first_written_s: float | None = None
        self._heard: dict[str, tuple[str, float]] = {}
        self._beats: dict[int, tuple[tuple[str, int], float]] = {}
        self._others: dict[int, RankMessage] = {}

    @property
    def own(self) -> RankMessage:
        """The message of this rank."""
        return self._own

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == LEADER

    def update(self, **changes: Any) -> None:
        """Change some fields of this rank's message.

        Raises:
            OSError: the message cannot be written.
        """
        with self._lock:
            self._say(**changes)

    def look(self) -> dict[int, RankMessage]:
        """Read the messages, and return those that belong to this job, by rank.

        Raises:
            ContestedError: another job uses the same folder.
            OSError: a message cannot be read, or this rank's message cannot be written.
        """
        if self._claim is not None and (why := self._claim.contested()) is not None:
            raise ContestedError(why)
        with self._lock:
            texts = self._folder.read()
            # without its lock, the last rank may remove the folder
            has_left = self._own.state == "left"
            is_there = self._own.to_text() == texts.pop(self.rank, None)
            if self._first_written_s is not None and not is_there and not has_left:
                # The last rank of an earlier job removed it.
                self._folder.write(self.rank, self._own.to_text())
            others = {}
            for rank, text in texts.items():
                doc = parse_message(text)
                if doc is not None and rank < self.size and doc.rank == rank:
                    others[rank] = doc
            if self.is_leader:
                valid = self._as_leader(others)
            else:
                valid = self._as_follower(others)
            now_s = own_clock_s()
            for rank, doc in valid.items():
                beat = doc.nonce, doc.beat
                if self._beats.get(rank, (None, 0.0))[0] != beat:
                    self._beats[rank] = beat, now_s
            if (now_s - self._beaten_s > BEAT_S and not has_left) or self._first_written_s is None:
                self._beaten_s = now_s
                self._say(beat=self._own.beat + 1)
            self._others = valid
            return {**valid, self.rank: self._own}

    def lost(self) -> set[int]:
        """Return the ranks on this host whose process has died without leaving first."""
        ids = self._own.host[0]
        lost = set()
        for rank, doc in self._others.items():
            is_here = ids and doc.host[0] == ids
            # A number that another process took has another start time.
            if is_here and doc.state != "left" and started_s(doc.pid[0]) != doc.pid[1]:
                lost.add(rank)
        return lost

    def silent(self) -> set[int]:
        """Return the ranks that were not met, or did not change their message, for long."""
        now_s = own_clock_s()
        quiet = set()
        for rank, (_, at_s) in self._beats.items():
            doc = self._others.get(rank)
            has_left = doc is not None and doc.state == "left"
            if now_s - at_s > SILENT_S and not has_left:
                quiet.add(rank)
        if self.age_s() > SILENT_S:
            return quiet | self.missing()
        return quiet

    def age_s(self) -> float:
        """Return the seconds since this rank wrote its first message."""
        if self._first_written_s is None:
            return 0.0
        return own_clock_s() - self._first_written_s

    def missing(self) -> set[int]:
        """Return the ranks that were never met."""
        return set(range(self.size)) - {self.rank} - set(self._others)

    def leave(self) -> None:
        """Announce that this rank leaves the job."""
        # The folder may be gone already, and then no other rank waits.
        with contextlib.suppress(OSError):
            self.update(state="left")

    def withdraw(self) -> None:
        """Remove this rank's message if it can no longer be written.

        A late reader of the old message would think that the process was killed.
        """
        with contextlib.suppress(OSError):
            self._folder.withdraw(self.rank)

    def tidy(self) -> None:
        """Remove the folder if this is the last rank that uses it."""
        with contextlib.suppress(OSError):
            docs = self.look()
            here = self._folder.written_here()
            is_last = self._claim is None or self._claim.is_last()
            if is_last and all(docs[rank].state == "left" for rank in here & set(docs)):
                self._folder.remove()

    def _say(self, **changes: Any) -> None:
        changed = replace(self._own, **changes)
        if changed != self._own or self._first_written_s is None:
            self._own = changed
            self._written_s = own_clock_s()
            self._first_written_s = self._first_written_s or self._written_s
            self._folder.write(self.rank, changed.to_text())

    def _as_leader(self, others: dict[int, RankMessage]) -> dict[int, RankMessage]:
        for rank, doc in others.items():
            if self._heard.get(str(rank), ("", 0.0))[0] != doc.nonce:
                self._heard[str(rank)] = doc.nonce, own_clock_s()
        valid = {}
        for rank, doc in others.items():
            if doc.of_leader == self._own.nonce:
                valid[rank] = doc
        self._say(
            heard=dict(self._heard),
            met={str(rank): doc.nonce for rank, doc in sorted(valid.items())},
        )
        return valid

    def _as_follower(self, others: dict[int, RankMessage]) -> dict[int, RankMessage]:
        leader = others.get(LEADER)
        if leader is None or self._first_written_s is None:
            return {}
        own_nonce, seen_s = leader.heard.get(str(self.rank), ("", 0.0))
        if own_nonce != self._own.nonce:
            return {}
        if self._own.of_leader != leader.nonce:
            at = clock_offset(
                self._own.host, leader.host, self._first_written_s, seen_s, own_clock_s()
            )
            self._say(of_leader=leader.nonce, offset_s=at.offset_s, slack_s=at.slack_s)
        met = {}
        for rank, doc in others.items():
            if leader.met.get(str(rank)) == doc.nonce:
                met[rank] = doc
        return {**met, LEADER: leader}


# Lock a rank of a folder, so that a second process cannot take the same rank. Two jobs that start
# on one folder at the same time may mix: each may hold some ranks. So a refused process leaves a
# note. A process that holds a rank continues only if its job is known. That is so if all ranks
# were there for a while, or all holders are of one kind and the refused process is of another.
# Otherwise the holder ends too, because the rank that it waits for belongs to the other job.

# Jobs that start within this time of each other may have mixed.
_TOGETHER_S: Final = 10.0
# Do not wait longer for a slow file system, because the command has to start.
_ANSWER_S: Final = 2.0
# A process that only looks at the lock holds it for a moment.
_TRIES: Final = 5
_PAUSE_S: Final = 0.02
_REFUSED: Final = ".refused"
# SLURM, PBS, LSF and Grid Engine. Two jobs of one scheduler have different numbers.
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
        holders = []
        for path in self._claims.iterdir():
            if path.name.isdigit():
                holders.append(path)
        kinds = {str(_read_record(path).get("kind")) for path in holders}
        latest_s = max((path.stat().st_mtime for path in holders), default=own_s)
        for path in refused:
            at_s = path.stat().st_mtime
            # A note from an earlier job.
            if at_s < own_s - _TOGETHER_S:
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
                # The last rank of an earlier job checks or removes the folder.
                time.sleep(_PAUSE_S)
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


# Compare the monotonic clocks of ranks, because wall clocks of hosts differ. Two processes share a
# monotonic clock if they share a host and a time namespace. Otherwise oomguard estimates the
# offset as NTP does. A rank wrote its message at ``written`` and read rank 0's answer at ``read``,
# both on its own clock. Rank 0 read the message at ``seen`` on its clock. So ``seen`` lies between
# ``written`` and ``read``, and the error is at most half of their distance.

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
# A zombie and a dead process keep their entry until their parent reads it.
_ENDED: Final = (b"Z", b"X")
_NAMESPACES: Final = Path("/proc/self/ns")


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Hold the seconds to add to a clock to get rank 0's clock, and the largest error."""

    offset_s: float
    slack_s: float


def host_identity() -> tuple[str, str, str]:
    """Return IDs of the PID namespace and clock of this process, and the host name.

    The IDs are empty if the system does not report them.
    """
    return _of_this_boot("pid"), _of_this_boot("time"), socket.gethostname()


def _of_this_boot(namespace: str) -> str:
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        # No /proc, as in some sandboxes. Such processes count as being on other hosts.
        return ""
    try:
        return f"{boot}/{(_NAMESPACES / namespace).stat().st_ino}"
    except OSError:  # a kernel without such namespaces has one of each
        return boot


def clock_offset(
    own: tuple[str, str, str],
    leader: tuple[str, str, str],
    written_s: float,
    seen_s: float,
    read_s: float,
) -> ClockOffset:
    """Return the offset from this process's monotonic clock to rank 0's.

    Args:
        own: this host, from ``host``.
        leader: rank 0's host, from ``host``.
        written_s: when this rank wrote the message that rank 0 read, on this clock.
        seen_s: when rank 0 read it, on rank 0's clock.
        read_s: when this rank read rank 0's answer, on this clock.
    """
    if own[1] and own[1] == leader[1]:
        return ClockOffset(0.0, 0.0)
    middle_s = (written_s + read_s) / 2
    return ClockOffset(seen_s - middle_s, (read_s - written_s) / 2)


def started_s(pid: int) -> float | None:
    """Return when a process of this host started, in ticks since boot.

    None means that the process does not exist or is a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # The fields are state and starttime: proc_pid_stat(5).
        return None if fields[0] in _ENDED else float(fields[19])
    except (OSError, ValueError, IndexError):
        # The process has ended, or another user's processes are hidden.
        return None


def own_pid() -> tuple[int, float]:
    """Return the ID of this process and its start time, which identify it on its host."""
    return os.getpid(), started_s(os.getpid()) or 0.0


def own_clock_s() -> float:
    """Return the time of this process's monotonic clock in seconds."""
    return time.monotonic()
