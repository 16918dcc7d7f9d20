"""Exchange messages between ranks: each rank writes one message, and all others read it.

A message holds everything that the others need. So late readers see the same state, and no message
gets lost.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

# The messages are files in a folder, one for each rank, and each write is atomic. A mirror
# (mirror.py) copies the messages of ranks on other hosts into ``there``.

# Folders that oomguard creates are hidden, so that they do not count as files of the command.
OWN_NAME: Final = ".oomguard-ranks-"
_HERE: Final = "here"
_THERE: Final = "there"
_END: Final = ".json"
# A message has a few kilobytes. Other users may be able to write the folder.
_MOST_BYTES: Final = 4 << 20


class MessageFolder:
    """Hold the messages of one job.

    Args:
        path: the folder. It is created for this user alone if it does not exist.

    Raises:
        OSError: the folder cannot be created, or another user can write it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[Path, tuple[tuple[int, int, int], str]] = {}
        self._make()
        for folder in (path.parent, path):
            status = folder.stat(follow_symlinks=False)
            if folder.name.startswith(OWN_NAME) and (
                status.st_uid != os.geteuid() or status.st_mode & 0o022
            ):
                raise PermissionError(errno.EPERM, "other users can write to it", str(folder))

    def _make(self) -> None:
        for folder in (self.path.parent, self.path, self.here, self.there):
            folder.mkdir(mode=0o700, parents=folder == self.path.parent, exist_ok=True)

    @property
    def here(self) -> Path:
        """The folder in which ranks with direct access write."""
        return self.path / _HERE

    @property
    def there(self) -> Path:
        """The folder in which a mirror writes messages of other hosts."""
        return self.path / _THERE

    def write(self, rank: int, text: str) -> None:
        """Write a rank's message atomically, so that it survives a crash of the host.

        Raises:
            OSError: the message cannot be written.
        """
        # The last rank of an earlier job may just have removed it.
        self._make()
        partial = self.here / f"{rank}.{os.getpid()}"
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.here / f"{rank}{_END}")

    def read(self) -> dict[int, str]:
        """Return every rank's message; unchanged files are not read again."""
        found: dict[int, str] = {}
        for folder in (self.there, self.here):
            with (
                contextlib.suppress(OSError),
                os.scandir(folder) as entries,
            ):
                # List the folder, so that an NFS client asks its server.
                for entry in entries:
                    name, dot, end = entry.name.partition(".")
                    if (
                        dot + end == _END
                        and name.isdigit()
                        and (text := self._text(Path(entry.path))) is not None
                    ):
                        found[int(name)] = text
        return found

    def withdraw(self, rank: int) -> None:
        """Remove a rank's message.

        Raises:
            OSError: the message cannot be removed.
        """
        (self.here / f"{rank}{_END}").unlink(missing_ok=True)

    def written_here(self) -> set[int]:
        """Return the ranks with direct access that have written into the folder."""
        ranks = set()
        for path in self.here.glob(f"*{_END}"):
            if path.stem.isdigit():
                ranks.add(int(path.stem))
        return ranks

    def _text(self, path: Path) -> str | None:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                state = status.st_ino, status.st_mtime_ns, status.st_size
                known = self._seen.get(path)
                if known is not None and known[0] == state:
                    return known[1]
                text = file.read(_MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            # The rank has not written yet, or it removed its message.
            return None
        self._seen[path] = state, text
        return text

    def remove(self) -> None:
        """Remove the folder, and its parent if oomguard created it and it is empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.parent.name.startswith(OWN_NAME):
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()


VERSION: Final = 1
# How an attempt of a rank ended: success, out of memory, an error that follows another rank's
# failure, an end by oomguard, a stop by a signal, or another failure.
How = Literal["ran", "memory", "secondary", "ended", "stopped", "other"]
# What a rank does: it runs its command, has ended, is ready to restart, or has left the job.
State = Literal["running", "ended", "ready", "left"]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Describe how the attempt of one rank ended.

    Attributes:
        number: the number of the attempt.
        how: the kind of end, one word.
        status: the exit status of the command.
        error: the error as text, empty if the command ran.
        incident: the memory failure, as ``report.json.stored_incident`` returns it.
        patches: the patches that the rank would apply, as JSON objects.
        refusal: why its command cannot run again, or None. ``seen`` and ``policy`` may still forbid
            it.
        failed_s: the time of the failure on its own monotonic clock, or None if unknown.
        seen: the side effects of the attempt; empty without any.
        idempotent: whether the user permits to repeat them.
        own_files: the files that this rank's oomguard writes.
        policy: the changes that are permitted on this rank.
    """

    number: int
    how: How
    status: int
    error: str = ""
    incident: Mapping[str, Any] | None = None
    patches: tuple[Mapping[str, Any], ...] = ()
    refusal: str | None = None
    failed_s: float | None = None
    seen: Mapping[str, Any] = field(default_factory=dict)
    idempotent: bool = False
    own_files: tuple[str, ...] = ()
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ends_all(self) -> bool:
        """Whether the other ranks' commands must end too, because they would wait for this rank."""
        return self.how == "memory"

    @property
    def calls_for_another(self) -> bool:
        """Whether all ranks should restart because of it."""
        return (
            self.ends_all
            and bool(self.patches)
            and self.refusal is None
            and (self.idempotent or not self._did_anything)
        )

    @property
    def _did_anything(self) -> bool:
        did = (
            self.seen.get("open_files")
            or self.seen.get("changed_files")
            or self.seen.get("requests", 0) != 0
        )
        return bool(did) and not self.seen.get("is_server", False)


@dataclass(frozen=True, slots=True)
class Decision:
    """Hold rank 0's decision for all ranks after an attempt.

    Attributes:
        number: the number of the attempt.
        again: whether all ranks restart.
        why: why they do not restart.
        first: the rank that ran out of memory first, or None if none did.
        is_order_known: whether the clocks could order the failures of several ranks.
        patches: the patches for all ranks, as JSON objects.
        silent: the ranks that did not report their result in time.
        hows: how each rank ended.
        variables: the environment variables of every rank's next attempt.
        is_exhausted: whether only a limit of relaunches or time prevents the restart, so that a
            later start may apply the patches.
        gone: the silent ranks whose process was killed.
        stopped: the ranks that a signal ended, and the signal.
    """

    number: int
    again: bool
    why: str = ""
    first: int | None = None
    is_order_known: bool = True
    patches: tuple[Mapping[str, Any], ...] = ()
    silent: tuple[int, ...] = ()
    hows: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    is_exhausted: bool = False
    gone: tuple[int, ...] = ()
    stopped: Mapping[str, str] = field(default_factory=dict)

    @property
    def absent(self) -> set[int]:
        """The ranks that cannot restart, because they are silent or stopped."""
        return {*self.silent, *map(int, self.stopped)}


@dataclass(frozen=True, slots=True)
class RankMessage:
    """Hold the message of a rank.

    Attributes:
        rank: the number of the rank.
        nonce: a random text of this run, which differs from those of earlier jobs.
        of_leader: rank 0's nonce, if this rank has read it.
        heard: rank 0 only: the nonce of each rank, and when rank 0 first read it on its own clock.
        met: rank 0 only: the nonce of each rank that has answered with rank 0's nonce.
        host: the PID namespace and clock of the rank, and the host name (barrier.py).
        pid: the ID and start time of the process, which identify it on its host.
        offset_s: the seconds to add to the rank's monotonic clock to get rank 0's, or None if
            unknown.
        slack_s: the largest error of ``offset_s``.
        beat: a heartbeat counter that grows while the process lives.
        number: the number of the current or next attempt.
        state: what the rank does.
        end: the result of its last attempt.
        decision: rank 0 only: its last decision.
    """

    rank: int
    nonce: str
    of_leader: str | None = None
    heard: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    met: Mapping[str, str] = field(default_factory=dict)
    host: tuple[str, str, str] = ("", "", "")
    pid: tuple[int, float] = (0, 0.0)
    offset_s: float | None = None
    slack_s: float = 0.0
    beat: int = 0
    number: int = 1
    state: State = "running"
    end: RankEnd | None = None
    decision: Decision | None = None

    def to_text(self) -> str:
        """Return the message as one line of JSON."""
        # The first message is written after the command has started.
        from oomguard.report.json import (
            json_line,
            plain_value,
        )

        return json_line(plain_value(asdict(self) | {"version": VERSION}))


def _with_tuples(row: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a row with tuples for the lists of these names, because JSON has no tuples."""
    changed = dict(row)
    for name in names:
        changed[name] = tuple(row[name])
    return changed


def parse_message(text: str) -> RankMessage | None:
    """Parse a message, or return None if it is invalid or has another version."""
    try:
        row = json.loads(text)
        if not isinstance(row, dict) or row.pop("version", None) != VERSION:
            return None
        end = row.pop("end")
        decision = row.pop("decision")
        for rank, (nonce, at_s) in row["heard"].items():
            row["heard"][rank] = (str(nonce), float(at_s))
        row["host"] = tuple(row["host"])
        row["pid"] = tuple(row["pid"])
        if end is not None:
            end = RankEnd(**_with_tuples(end, "patches", "own_files"))
        if decision is not None:
            decision = Decision(**_with_tuples(decision, "patches", "silent", "gone"))
        return RankMessage(**row, end=end, decision=decision)
    except (ValueError, TypeError, KeyError, AttributeError):
        # Any program may have written the file, so every form must be expected.
        return None
