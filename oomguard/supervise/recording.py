"""A bounded copy of what a command prints, in an unlinked file, to be diagnosed when the command has ended.

The file is cut into slots. The first slots and the last ones are kept whatever happens; between them a slot is kept where the
marker finds an anchor in it or beside it, and given back where it does not. What the marker has not reached waits; where the
slots run out, the oldest of those between is dropped and counted.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Final

from oomguard.supervise.slots import Missing, Slot

SLOT_BYTES: Final = 1 << 20
HEAD_SLOTS: Final = 16
TAIL_SLOTS: Final = 16
MARKED_SLOTS: Final = 96
WAITING_SLOTS: Final = 128
# Two streams that take turns make a piece of each line: a slot ends there, so that their table stays small.
MOST_PIECES: Final = 1 << 13
# An engine speaks when it starts and when it dies.
_SEARCHED_SLOTS: Final = 4
TIME_STEP_S: Final = 1.0
MOST_TIMES: Final = 4096
CAP_BYTES: Final = (HEAD_SLOTS + TAIL_SLOTS + MARKED_SLOTS + WAITING_SLOTS) * SLOT_BYTES


class Recording:
    """What a run has printed so far, as far as it is kept.

    One thread writes (``room``, ``take``, ``write``), one may mark (``unmarked``, ``mark``); ``kept`` is for when both are done.

    Attributes:
        came: bytes that came, over all streams.
        unseen_bytes: bytes that were dropped before anybody looked into them.
        failed: why nothing is recorded any more, None while it is.
    """

    def __init__(self, on_waiting: Callable[[], None] = lambda: None) -> None:
        self._fd = unlinked_file()
        self._on_waiting = on_waiting
        self._lock = threading.Lock()
        self._free = list(range(CAP_BYTES - SLOT_BYTES, -1, -SLOT_BYTES))
        self._sealed: list[Slot | Missing] = []
        self.came = 0
        self._times: list[tuple[int, float]] = []
        self._count = 0
        self._open = self._next()
        self.unseen_bytes = 0
        self.failed: str | None = None

    def close(self) -> None:
        """Give the file back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def room(self) -> int:
        """Bytes that the slot in use still takes."""
        return SLOT_BYTES - self._open.size

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._open.size + sum(slot.size for slot in self._sealed if isinstance(slot, Slot))

    def take(self, stream: int, pipe: int, count: int) -> None:
        """Move ``count`` bytes, at most ``room``, from a pipe into the copy; they are gone from the pipe in any case."""
        while count:
            at = self._open.at + self._open.size
            try:
                if self.failed is not None:
                    count -= len(os.read(pipe, count))
                    continue
                moved = os.splice(pipe, self._fd, count, offset_dst=at)
            except OSError as error:
                if error.errno == errno.EINVAL:  # a file system that takes no splice
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

    def _refused(self, error: OSError) -> None:
        """Go on in the oldest place that can be spared where the disk is full, so that the end is kept; else record nothing more."""
        with self._lock:
            self._free.clear()  # no place that was not written yet can be
            full = [s for s in self._sealed if isinstance(s, Slot) and s.size == SLOT_BYTES]
            if error.errno not in {errno.ENOSPC, errno.EDQUOT} or len(full) < 2:
                self.failed = os.strerror(error.errno or 0)
                return
            if self._open.size:
                self._sealed.append(self._open)
            behind_head = (slot for slot in full if slot.number >= HEAD_SLOTS)
            self._drop(next(behind_head, full[1]))
            self._open = self._next()

    def _add(self, stream: int, count: int) -> None:
        slot, now_s = self._open, time.monotonic()
        if not self._times or now_s - self._times[-1][1] >= TIME_STEP_S:
            self._times.append((self.came, now_s))
            if len(self._times) > MOST_TIMES:  # what is long ago needs no second
                del self._times[1 : MOST_TIMES // 2 : 2]
        self.came += count
        slot.size += count
        if slot.pieces and slot.pieces[-1] & 0xFF == stream:
            slot.pieces[-1] += count << 8
        else:
            slot.pieces.append(count << 8 | stream)
        if slot.size == SLOT_BYTES or len(slot.pieces) >= MOST_PIECES:
            with self._lock:
                self._sealed.append(slot)
                if not self._free:
                    self._make_room()
                self._open = self._next()
            if slot.number >= HEAD_SLOTS:
                self._on_waiting()

    def _next(self) -> Slot:
        slot = Slot(self._count, self._free.pop())
        self._count += 1
        return slot

    def unmarked(self) -> Slot | None:
        """Return the oldest slot behind the head that nobody has looked into; it stays until it is marked."""
        with self._lock:
            return next(
                (s for s in self._sealed if isinstance(s, Slot) and s.number >= HEAD_SLOTS and s.anchored is None), None
            )

    def read(self, slot: Slot) -> dict[int, bytes]:
        """Return what each stream printed into a slot."""
        parts: dict[int, list[bytes]] = {}
        for stream, at, length in slot.spans():
            parts.setdefault(stream, []).append(os.pread(self._fd, length, at))
        return {stream: b"".join(found) for stream, found in parts.items()}

    def mark(self, slot: Slot, *, anchored: bool, newlines: dict[int, int]) -> None:
        """Note what was found in a slot, and give back what is no longer needed."""
        with self._lock:
            slot.anchored, slot.newlines = anchored, newlines
            self._give_back()

    def _give_back(self) -> None:
        """Drop the slots without an anchor in them or beside them; of too many with one, those in the middle."""
        last, kept, over = self._count - TAIL_SLOTS, [], []
        for i, slot in enumerate(self._sealed):
            if isinstance(slot, Missing) or slot.number < HEAD_SLOTS or slot.anchored is None:
                continue
            beside = [s for s in self._sealed[max(0, i - 1) : i + 2] if isinstance(s, Slot)]
            if any(s.anchored or (s.anchored is None and s.number >= HEAD_SLOTS) for s in beside):
                kept.append(slot)
            elif slot.number < last:
                over.append(slot)
        kept = [slot for slot in kept if slot.number < last]
        while len(kept) > MARKED_SLOTS:
            over.append(kept.pop(len(kept) // 2))
        for slot in over:
            self._drop(slot)

    def _make_room(self) -> None:
        """Drop a slot so that the output goes on: the oldest that nobody has looked into, else the oldest between head and tail."""
        kept = [slot for slot in self._sealed if isinstance(slot, Slot)]
        between = [slot for slot in kept if HEAD_SLOTS <= slot.number < self._count - TAIL_SLOTS]
        self._drop(next((slot for slot in between if slot.anchored is None), (between or kept[1:])[0]))

    def _drop(self, slot: Slot) -> None:
        at = self._sealed.index(slot)
        before = self._sealed[at - 1] if at else None
        gap = before if isinstance(before, Missing) else Missing()
        gap.add(slot.sizes(), slot.newlines, self._inside(slot))
        behind = self._sealed[at + 1] if at + 1 < len(self._sealed) else None
        if slot.anchored is None:
            self.unseen_bytes += slot.size
        if gap is before:
            del self._sealed[at]
        else:
            self._sealed[at] = gap
        if isinstance(behind, Missing):
            gap.add(behind.sizes, behind.newlines, behind.inside)
            self._sealed.remove(behind)
        self._free.append(slot.at)

    def _inside(self, slot: Slot) -> dict[int, bool]:
        ends = {stream: at + length - 1 for stream, at, length in slot.spans()}
        return {stream: os.pread(self._fd, 1, at) != b"\n" for stream, at in ends.items()}

    def newlines(self, at: int, length: int) -> int:
        """Count the newlines in a piece of the file."""
        return os.pread(self._fd, length, at).count(b"\n")

    def read_into(self, view: memoryview, at: int) -> int:
        """Read bytes of the file from offset ``at`` until the view is full; return how many came."""
        return os.preadv(self._fd, [view], at)

    def may_hold(self, words: Iterable[str]) -> bool:
        """Return whether a word of these, in lower case, stands at the beginning or the end of what is kept, in any case."""
        wanted = [word.encode() for word in words]
        slots = [part for part in self.kept() if isinstance(part, Slot)]
        ends = slots if len(slots) <= 2 * _SEARCHED_SLOTS else [*slots[:_SEARCHED_SLOTS], *slots[-_SEARCHED_SLOTS:]]
        texts = (data.lower() for slot in ends for data in self.read(slot).values())
        return any(word in text for text in texts for word in wanted)

    def new_since(self, place: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
        """Return what came since a place, as far as it is kept, all streams together, and the place behind it; (0, 0) is the beginning."""
        number, offset = place
        parts: list[bytes] = []
        for slot in self.kept():
            if not isinstance(slot, Slot) or slot.number < number:
                continue
            begin, size = offset if slot.number == number else 0, slot.size
            parts.append(os.pread(self._fd, size - begin, slot.at + begin))
            place = slot.number, size
        return b"".join(parts), place

    def printed_s(self, came: int) -> float:
        """Return when the byte came that ``came`` others came before, on the monotonic clock, to a second or a little more."""
        at = bisect_right(self._times, (came, math.inf)) - 1
        return self._times[max(0, at)][1] if self._times else 0.0

    def tail(self, stream: int, limit_bytes: int) -> bytes:
        """Return the last bytes of a stream, as far back as nothing is missing."""
        parts: list[bytes] = []
        size = 0
        for part in reversed(self.kept()):
            if isinstance(part, Missing) or size >= limit_bytes:
                break
            parts.append(self.read(part).get(stream, b""))
            size += len(parts[-1])
        return b"".join(reversed(parts))[-limit_bytes:]

    def kept(self) -> list[Slot | Missing]:
        """Return what is kept, and what is missing between, in the order of arrival."""
        with self._lock:
            return [*self._sealed, self._open]


def unlinked_file() -> int:
    """Open a file without a name; in memory where no temporary folder can be written."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(prefix="oomguard-") as file:
        return os.dup(file.fileno())
    return os.memfd_create("oomguard")
