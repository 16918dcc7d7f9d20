"""Keep a bounded copy of a command's output in an unlinked file: its beginning and its end.

The file consists of slots. The first slots are kept, and of the others the last ones. If no slot is
free, the oldest one after the first slots is dropped and counted. ``index`` describes the file for
another process that reads it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Final

SLOT_BYTES: Final = 1 << 20
HEAD_SLOTS: Final = 16
SLOTS: Final = 256
CAP_BYTES: Final = SLOTS * SLOT_BYTES
# If two streams alternate, each line is a piece. A slot then ends early, so that its table stays
# small.
MOST_PIECES: Final = 1 << 13
# An engine prints its name at its start and at its end.
_SEARCHED_SLOTS: Final = 4
TIME_STEP_S: Final = 1.0
# If more than this arrives within one step and is dropped, its lines are not counted.
FLOOD_BYTES: Final = 16 << 20
MOST_TIMES: Final = 4096
_COPIED_BYTES: Final = 1 << 20


class Slot:
    """Describe one slot of the file, with the stream of each piece.

    Attributes:
        number: the number of the slot, from 0, in the order of arrival.
        at: its offset in the file.
        size: its bytes.
        pieces: ``length << 8 | stream``, in the order of arrival.
    """

    __slots__ = ("at", "number", "pieces", "size")

    def __init__(self, number: int, at: int, size: int = 0, pieces: Iterable[int] = ()) -> None:
        self.number = number
        self.at = at
        self.size = size
        self.pieces = array("Q", pieces)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield each piece as stream, offset in the file, and length."""
        at = self.at
        for piece in self.pieces:
            yield piece & 0xFF, at, piece >> 8
            at += piece >> 8

    def sizes(self) -> dict[int, int]:
        """Return the number of bytes of each stream."""
        found: dict[int, int] = {}
        for piece in self.pieces:
            found[piece & 0xFF] = found.get(piece & 0xFF, 0) + (piece >> 8)
        return found


class DroppedOutput:
    """Count the output that was dropped between two slots, by stream.

    The counts are bytes, lines, and whether the gap ends inside a line.
    """

    __slots__ = ("inside", "newlines", "sizes")

    def __init__(
        self,
        sizes: dict[int, int] | None = None,
        newlines: dict[int, int] | None = None,
        inside: dict[int, bool] | None = None,
    ) -> None:
        self.sizes = sizes or {}
        self.newlines = newlines or {}
        self.inside = inside or {}

    def add(self, other: DroppedOutput) -> None:
        """Add the counts of the gap that follows."""
        for own, more in ((self.sizes, other.sizes), (self.newlines, other.newlines)):
            for stream, count in more.items():
                own[stream] = own.get(stream, 0) + count
        self.inside |= other.inside


class RecordedOutput:
    """Read a recorded output.

    Attributes:
        came: bytes that arrived, over all streams.
        failed: why the recording ended; None while it continues.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._parts: list[Slot | DroppedOutput] = []
        self._times: list[tuple[int, float]] = []
        self.came = 0
        self.failed: str | None = None

    @classmethod
    def from_index(cls, fd: int, index: dict[str, Any]) -> RecordedOutput:
        """Return an output that another process recorded, from its ``index``."""
        found = cls(fd)
        found.came = index["came"]
        found.failed = index["failed"]
        found._times = [(came, at_s) for came, at_s in index["times"]]
        for part in index["parts"]:
            if "at" in part:
                found._parts.append(Slot(part["number"], part["at"], part["size"], part["pieces"]))
            else:
                tables = (part["sizes"], part["newlines"], part["inside"])
                found._parts.append(
                    DroppedOutput(
                        *({int(key): value for key, value in one.items()} for one in tables)
                    )
                )
        return found

    def index(self, *, counts: bool = False) -> dict[str, Any]:
        """Describe the file as a JSON object; with ``counts``, only the number of bytes."""
        if counts:
            return {"came": self.came, "failed": self.failed, "times": [], "parts": []}
        parts: list[dict[str, Any]] = []
        for part in self.kept():
            if isinstance(part, Slot):
                fields = {name: getattr(part, name) for name in ("number", "at", "size")}
                parts.append({**fields, "pieces": part.pieces.tolist()})
            else:
                fields = {"sizes": part.sizes, "newlines": part.newlines, "inside": part.inside}
                parts.append(fields)
        return {"came": self.came, "failed": self.failed, "times": self._times, "parts": parts}

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def size(self) -> int:
        """Number of recorded bytes."""
        return sum(slot.size for slot in _slots_of(self.kept()))

    def kept(self) -> list[Slot | DroppedOutput]:
        """Return recorded slots and gaps in the order of arrival."""
        return list(self._parts)

    def read(self, slot: Slot) -> dict[int, bytes]:
        """Return the output of each stream in a slot."""
        parts: dict[int, list[bytes]] = {}
        for stream, at, length in slot.spans():
            parts.setdefault(stream, []).append(os.pread(self._fd, length, at))
        return {stream: b"".join(found) for stream, found in parts.items()}

    def newlines(self, at: int, length: int) -> int:
        """Count the newlines in a piece of the file."""
        return os.pread(self._fd, length, at).count(b"\n")

    def read_into(self, view: memoryview, at: int) -> int:
        """Read from offset ``at`` into the view; return the number of bytes."""
        return os.preadv(self._fd, [view], at)

    def may_hold(self, words: Iterable[str]) -> bool:
        """Return whether the beginning or the end contains one of these words (case-insensitive).

        The words must be in lower case.
        """
        wanted = [word.encode() for word in words]
        slots = _slots_of(self.kept())
        if len(slots) <= 2 * _SEARCHED_SLOTS:
            ends = slots
        else:
            ends = [*slots[:_SEARCHED_SLOTS], *slots[-_SEARCHED_SLOTS:]]
        for slot in ends:
            for data in self.read(slot).values():
                text = data.lower()
                if any(word in text for word in wanted):
                    return True
        return False

    def new_since(self, place: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
        """Return the recorded output of all streams after a position, and the next position.

        (0, 0) is the beginning.
        """
        number, offset = place
        parts: list[bytes] = []
        for slot in self.kept():
            if not isinstance(slot, Slot) or slot.number < number:
                continue
            begin = offset if slot.number == number else 0
            size = slot.size
            parts.append(os.pread(self._fd, size - begin, slot.at + begin))
            place = slot.number, size
        return b"".join(parts), place

    def printed_s(self, came: int) -> float:
        """Return when the byte at position ``came`` arrived.

        The time is on the monotonic clock, with a precision of about one second.
        """
        # Loaded here, because the supervisor never calls this.
        from bisect import bisect_right

        at = bisect_right(self._times, (came, math.inf)) - 1
        if self._times:
            return self._times[max(0, at)][1]
        return 0.0

    def tail(self, stream: int, limit_bytes: int) -> bytes:
        """Return the last bytes of a stream, back to the last gap at most."""
        parts: list[bytes] = []
        size = 0
        for part in reversed(self.kept()):
            if isinstance(part, DroppedOutput) or size >= limit_bytes:
                break
            parts.append(self.read(part).get(stream, b""))
            size += len(parts[-1])
        return b"".join(reversed(parts))[-limit_bytes:]


class OutputBuffer(RecordedOutput):
    """Record an output. ``forget`` begins the next recording in the same file."""

    def __init__(self) -> None:
        super().__init__(unlinked_file())
        self._begin()

    def _begin(self) -> None:
        self._parts = []
        self._times = []
        # A stack of free offsets: the lowest is used first, so that a short output stays a small
        # file.
        self._free = list(range(CAP_BYTES - SLOT_BYTES, -1, -SLOT_BYTES))
        self._count = self.came = 0
        self.failed = None
        self._open = self._next()

    def forget(self) -> None:
        """Begin an empty recording."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        self._begin()

    @property
    def fd(self) -> int:
        """The descriptor, for a process that reads the file too."""
        return self._fd

    @property
    def room(self) -> int:
        """Number of bytes that still fit into the current slot."""
        return SLOT_BYTES - self._open.size

    def take(self, stream: int, pipe: int, count: int) -> None:
        """Move ``count`` bytes (at most ``room``) from a pipe into the copy.

        The bytes leave the pipe even if the copy fails.
        """
        while count:
            at = self._open.at + self._open.size
            try:
                if self.failed is not None:
                    count -= len(os.read(pipe, count))
                    continue
                moved = os.splice(pipe, self._fd, count, offset_dst=at)
            except OSError as error:
                # This file system does not support splice(2), so copy through a buffer.
                if error.errno == errno.EINVAL:
                    data = os.read(pipe, count)
                    count -= len(data)
                    self.write(stream, memoryview(data))
                    continue
                self._refused(error)
                continue
            count -= moved
            self._add(stream, moved)

    def write(self, stream: int, data: memoryview) -> None:
        """Copy bytes that were read."""
        while data and self.failed is None:
            part = data[: self.room]
            try:
                written = os.pwrite(self._fd, part, self._open.at + self._open.size)
            except OSError as error:
                self._refused(error)
                continue
            data = data[written:]
            self._add(stream, written)

    def kept(self) -> list[Slot | DroppedOutput]:
        """Return recorded slots and gaps in the order of arrival."""
        return [*self._parts, self._open]

    def copy_to(self, path: str) -> None:
        """Write the recording to a new file that only its user may read.

        Raises:
            OSError: if the file cannot be written.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for part in self.kept():
                if isinstance(part, DroppedOutput):
                    os.write(
                        fd, f"\n[{sum(part.sizes.values())} bytes are missing here]\n".encode()
                    )
                    continue
                at = part.at
                end = part.at + part.size
                while at < end:
                    data = os.pread(self._fd, min(_COPIED_BYTES, end - at), at)
                    if not data:
                        break
                    at += len(data)
                    os.write(fd, data)
        finally:
            os.close(fd)

    def _refused(self, error: OSError) -> None:
        """Continue in the oldest spare slot if the disk is full, otherwise stop recording.

        The end of the output is thus kept.
        """
        # The disk has no space for slots that were never written.
        self._free.clear()
        full = []
        for slot in _slots_of(self._parts):
            if slot.size == SLOT_BYTES:
                full.append(slot)
        if error.errno not in {errno.ENOSPC, errno.EDQUOT} or len(full) < 2:
            self.failed = os.strerror(error.errno or 0)
            return
        if self._open.size:
            self._parts.append(self._open)
        self._drop(_first_spare(full, full[1]))
        self._open = self._next()

    def _add(self, stream: int, count: int) -> None:
        slot = self._open
        now_s = time.monotonic()
        if not self._times or now_s - self._times[-1][1] >= TIME_STEP_S:
            self._times.append((self.came, now_s))
            # Drop every second one of the older times, which need less precision.
            if len(self._times) > MOST_TIMES:
                del self._times[1 : MOST_TIMES // 2 : 2]
        self.came += count
        slot.size += count
        if slot.pieces and slot.pieces[-1] & 0xFF == stream:
            slot.pieces[-1] += count << 8
        else:
            slot.pieces.append(count << 8 | stream)
        if slot.size == SLOT_BYTES or len(slot.pieces) >= MOST_PIECES:
            self._parts.append(slot)
            if not self._free:
                slots = _slots_of(self._parts)
                self._drop(_first_spare(slots, slots[0]))
            self._open = self._next()

    def _next(self) -> Slot:
        slot = Slot(self._count, self._free.pop())
        self._count += 1
        return slot

    def _drop(self, slot: Slot) -> None:
        """Count a slot as dropped, merged with the gaps next to it."""
        at = self._parts.index(slot)
        if at:
            before = self._parts[at - 1]
        else:
            before = None
        if isinstance(before, DroppedOutput):
            gap = before
        else:
            gap = DroppedOutput()
        gap.add(self._as_missing(slot))
        if gap is before:
            del self._parts[at]
        else:
            self._parts[at] = gap
        if at + 1 < len(self._parts):
            behind = self._parts[at + 1]
        else:
            behind = None
        if gap is not before and isinstance(behind, DroppedOutput):
            gap.add(behind)
            self._parts.remove(behind)
        self._free.append(slot.at)

    def _as_missing(self, slot: Slot) -> DroppedOutput:
        # Reading a flood again, to count its lines, would slow the command down.
        if self._times and self.came - self._times[-1][0] > FLOOD_BYTES:
            ends = {stream: at + length - 1 for stream, at, length in slot.spans()}
            inside = {stream: os.pread(self._fd, 1, at) != b"\n" for stream, at in ends.items()}
            return DroppedOutput(slot.sizes(), {}, inside)
        parts = self.read(slot)
        newlines = {stream: data.count(b"\n") for stream, data in parts.items()}
        return DroppedOutput(
            slot.sizes(), newlines, {stream: data[-1:] != b"\n" for stream, data in parts.items()}
        )


def _slots_of(parts: Iterable[Slot | DroppedOutput]) -> list[Slot]:
    """Return the slots without the gaps between them."""
    slots = []
    for part in parts:
        if isinstance(part, Slot):
            slots.append(part)
    return slots


def _first_spare(slots: Iterable[Slot], otherwise: Slot) -> Slot:
    """Return the oldest slot that is not part of the beginning of the output."""
    for slot in slots:
        if slot.number >= HEAD_SLOTS:
            return slot
    return otherwise


def temporary_folders() -> list[str]:
    """Return the folders for temporary files, the user's own first."""
    # each file there is new
    folders = (os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
    found = []
    for folder in folders:
        if folder.startswith("/"):
            found.append(folder)
    return found


def unlinked_file() -> int:
    """Open a file without a name in a temporary folder, or in memory if none is writable."""
    for folder in temporary_folders():
        with contextlib.suppress(OSError, ValueError):
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600)
    return os.memfd_create("oomguard")
