"""What one rank says of itself: one document that it alone writes, and all others read.

Each rank's document holds all that the others need, so whoever reads late reads the same; nothing
is sent twice, and no message is lost.
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

# Where the documents lie: a folder that all ranks see, one file a rank, written whole or not at
# all.
#
# Ranks of other hosts, which do not see the folder, are brought there by a mirror (mirror.py): what
# it brings lies in ``there``.

# How the folders begin that are made here: hidden, so that none counts as a file that the command
# may have written.
OWN_NAME: Final = ".oomguard-ranks-"
_HERE: Final = "here"
_THERE: Final = "there"
_END: Final = ".json"
_MOST_BYTES: Final = 4 << 20


class Folder:
    """The documents of one job.

    Args:
        path: the folder; it is made, for this user alone, where it is not there.

    Raises:
        OSError: it cannot be made, or another user may write it.
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
                raise PermissionError(errno.EPERM, "others may write it", str(folder))

    def _make(self) -> None:
        for folder in (self.path.parent, self.path, self.here, self.there):
            folder.mkdir(mode=0o700, parents=folder == self.path.parent, exist_ok=True)

    @property
    def here(self) -> Path:
        """Where ranks that see the folder write."""
        return self.path / _HERE

    @property
    def there(self) -> Path:
        """Where a mirror puts what the others say."""
        return self.path / _THERE

    def write(self, rank: int, text: str) -> None:
        """Write a rank's document so that nobody reads half of it, and a host that dies leaves it
        whole. Raises OSError.
        """
        self._make()  # the last rank of an earlier job may just have removed it
        partial = self.here / f"{rank}.{os.getpid()}"
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.here / f"{rank}{_END}")

    def read(self) -> dict[int, str]:
        """Return every rank's document; a file that has not changed is not read again."""
        found: dict[int, str] = {}
        for folder in (self.there, self.here):
            with (
                contextlib.suppress(OSError),
                os.scandir(folder) as entries,
            ):  # a listing, so that NFS asks its server
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
        """Remove a rank's document. Raises OSError."""
        (self.here / f"{rank}{_END}").unlink(missing_ok=True)

    def written_here(self) -> set[int]:
        """Return the ranks that see the folder and have written into it."""
        return {int(path.stem) for path in self.here.glob(f"*{_END}") if path.stem.isdigit()}

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
            return None
        self._seen[path] = state, text
        return text

    def remove(self) -> None:
        """Remove it: no rank reads it any more. The one above goes too where it was made for it and
        is empty.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.parent.name.startswith(OWN_NAME):
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()


VERSION: Final = 1
# How an attempt of a rank ended: well; of memory; of a message that only passes on another rank's
# failure; since we ended it; by a signal to its oomguard, which is a stop; else.
How = Literal["ran", "memory", "secondary", "ended", "stopped", "other"]
# What a rank does: its command runs, it has ended, it could start again, it has nothing more to do
# with the job.
State = Literal["running", "ended", "ready", "left"]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How the attempt of one rank ended.

    Attributes:
        number: the attempt.
        how: in one word.
        status: the command's exit status.
        error: in words, empty where it ran.
        incident: the memory failure as ``report.json.kept_incident`` has it.
        patches: what the rank would change for it, as the contract's objects.
        refusal: why its command cannot be run again; None: it can be, as far as ``seen`` and
            ``policy`` permit it.
        failed_s: when it failed, on its own monotonic clock; None where that is not known.
        seen: what the attempt did to the outside world (effects.py); nothing where it did nothing.
        idempotent: the user permits to repeat that.
        own_files: what this rank's oomguard itself writes.
        policy: what may be changed on this rank (permitted.py).
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
        """Whether the other ranks' commands are ended for it: they would wait for this rank in a
        collective.
        """
        return self.how == "memory"

    @property
    def calls_for_another(self) -> bool:
        """Whether all ranks should start again for it."""
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
    """What rank 0 decided after an attempt, for all.

    Attributes:
        number: the attempt.
        again: whether all start again.
        why: why not, where they do not.
        first: the rank that failed first; None where none failed of memory.
        is_order_known: whether the ranks' clocks told which failed first, where several did.
        patches: what all change, as the contract's objects.
        silent: ranks that had not said how they ended in time.
        hows: how each rank ended.
        variables: what every rank's command gets in its environment.
        is_exhausted: whether only their relaunches or their time hold the ranks back, so that a
            later start may make the changes.
        gone: of the silent ranks those whose process was killed for certain.
        stopped: ranks that were ended by a signal, and by which.
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
        """The ranks that are not there to start again: silent or stopped."""
        return {*self.silent, *map(int, self.stopped)}


@dataclass(frozen=True, slots=True)
class Said:
    """The document of a rank.

    Attributes:
        rank: whose it is.
        nonce: drawn for this run: a document that an earlier job left has another one.
        of_leader: the nonce that rank 0 has, as far as it was read.
        heard: of rank 0: the nonce that each rank shows, and when rank 0 read it first, on its own
            clock.
        met: of rank 0: the nonce of each rank that has answered to rank 0's own.
        host: whose process ids and whose clock it has, and the host's name (clock.py).
        pid: the process, with its start, by which it is known on its own host.
        offset_s: what has to be added to the rank's monotonic clock to have rank 0's; None: not
            known yet.
        slack_s: how far off that may be.
        beat: grows while the process lives.
        number: the attempt that it makes, or is about to.
        state: what the rank does.
        end: how its last attempt ended.
        decision: of rank 0: the last one.
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
        """Return the document as one line of JSON."""
        from oomguard.report.json import (
            json_line,
            plain_value,
        )  # written first when the command has started

        return json_line(plain_value(asdict(self) | {"version": VERSION}))


def said(text: str) -> Said | None:
    """Read a document; None for one that is none, or of another version."""
    try:
        row = json.loads(text)
        if not isinstance(row, dict) or row.pop("version", None) != VERSION:
            return None
        end = row.pop("end")
        decision = row.pop("decision")
        row["heard"] = {
            rank: (str(nonce), float(at_s)) for rank, (nonce, at_s) in row["heard"].items()
        }
        row["host"], row["pid"] = tuple(row["host"]), tuple(row["pid"])
        return Said(
            **row,
            end=None
            if end is None
            else RankEnd(**end | {name: tuple(end[name]) for name in ("patches", "own_files")}),
            decision=None
            if decision is None
            else Decision(
                **decision | {name: tuple(decision[name]) for name in ("patches", "silent", "gone")}
            ),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
