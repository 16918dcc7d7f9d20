"""Read only the lines that matter of a huge input: those around an anchor, with their true numbers
and offsets.

Blocks of bytes are searched before they are cut into lines; lines far from any anchor are counted
and dropped.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import IO, Final, cast

from oomguard.core.text import strip_escapes
from oomguard.scan.anchors import Finder
from oomguard.scan.log_prefixes import TRACEBACK
from oomguard.scan.source import Line, LineSplitter, encoding_of, read_lines

# Lines that say the same again and again: after the first ones they are counted and not read.
#
# A server that catches each failure prints it a hundred thousand times, and each costs as much to
# read as the first.

# Of each shape so many lines are read: hundreds of processes, or restarts, differ in their numbers
# alone. Of a run of repeats behind them so many are read at its beginning and at its end.
KEPT: Final = 600
EDGE: Final = 10
LEAST_RUN: Final = 120
_MOST_SHAPES: Final = 20_000
# Numbers and identifiers differ from one repeat to the next.
_DIGITS: Final = b"0123456789abcdef"
_SHAPE: Final = bytes(ord("0") if byte in _DIGITS else byte for byte in range(256))


class Repeats:
    """Knows the shapes of the lines so far; one for an input.

    Attributes:
        are_many: whether the part before had stretches of them.
    """

    def __init__(self) -> None:
        self.are_many = False
        self._counts: dict[bytes, int] = {}

    def dropped(self, data: bytes) -> list[tuple[int, int]]:
        """Return the stretches of some whole lines, as offsets of their beginning and end, that
        only repeat what came before.
        """
        counts = self._counts
        found = []
        if len(counts) > _MOST_SHAPES:
            counts.clear()
        starts = [0]
        begin = -1
        number = 0
        at = 0
        for line in data.translate(_SHAPE).split(b"\n"):
            at += len(line) + 1
            starts.append(at)
            seen = counts[line] = counts.get(line, 0) + 1
            if seen <= KEPT:
                if 0 <= begin < number - LEAST_RUN:
                    found.append((starts[begin + EDGE], starts[number - EDGE]))
                begin = -1
            elif begin < 0:
                begin = number
            number += 1
        if 0 <= begin < number - LEAST_RUN:
            found.append((starts[begin + EDGE], starts[number - EDGE]))
        return found


def without(
    regions: list[tuple[int, int]], dropped: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return what is left of regions, sorted as the stretches are, that are dropped from them."""
    left = []
    rest = iter([*dropped, (1 << 62, 1 << 62)])
    start, stop = next(rest)
    for begin, end in regions:
        at = begin
        while at < end:
            while stop <= at:
                start, stop = next(rest)
            if start > at:
                left.append((at, min(start, end)))
            if start > at:
                at = max(at, min(start, end))
            else:
                at = min(stop, end)
    return left


BLOCK_BYTES: Final = 4 << 20
# A shorter input is read line by line, which is faster than making the finder ready, but where it
# has many lines.
SHORT_BYTES: Final = 1 << 18
MANY_LINES: Final = 4000
LINES_BEFORE: Final = 6
LINES_AFTER: Final = 24
# A traceback ends with its exception: if one begins behind an anchor, so many lines may follow.
TRACEBACK_LINES: Final = 400
_TRACEBACK: Final = TRACEBACK.encode()
# A line reaches at most so far around an anchor; a longer one is cut, as everywhere.
REACH_BYTES: Final = 1 << 16
# A container runtime's log, whose long lines are cut into pieces: an anchor may be cut with them
# (``pieces``).
_RUNTIME: Final = re.compile(
    rb'^(?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) std(?:out|err) [PF]|\{[^\n]*"(?:logtag|_p)":\s?"[PF]")',
    re.MULTILINE,
)
_PIECE: Final = re.compile(rb' std(?:out|err) P(?::\S*)? |"(?:logtag|_p)":\s?"P"')
# So many null bytes are UTF-16 somewhere in it, whose anchors no search of bytes finds.
_NULLS_RATIO: Final = 0.01
Ends = Callable[[memoryview], list[int]]


@dataclass(frozen=True, slots=True)
class Gap:
    """Lines were left out: what follows does not continue what came before.

    Attributes:
        repeats: how many of them only repeat what was printed many times before.
    """

    repeats: int = 0


@dataclass(slots=True)
class InputPosition:
    """How far the input has been counted: the next line, the offset of the next byte, and whether
    it is inside the line.
    """

    line: int = 1
    byte: int = 0
    inside: bool = False


def skim(
    stream: IO[bytes], make_finder: Callable[[], Finder], start: InputPosition | None = None
) -> Iterator[Line | Gap]:
    """Yield the lines near an anchor, a ``Gap`` before each group, in constant memory.

    A short input comes whole, or not at all where its lines are many and hold no anchor.

    Args:
        stream: the input, unpacked.
        make_finder: makes the finder of anchors; called only for an input that is not short, or has
            many lines.
        start: where in a longer input it begins; None for an input from its beginning.
    """
    place = start or InputPosition()
    head = b""
    while len(head) < SHORT_BYTES and (more := stream.read(BLOCK_BYTES)):
        head += more
    is_first = place.byte == 0
    is_short = len(head) < SHORT_BYTES
    is_wide = is_first and _is_wide(head)
    is_cut = _RUNTIME.search(head, 0, REACH_BYTES) is not None
    is_whole = is_wide or (is_cut and _PIECE.search(head) is not None)
    if (
        is_short
        and not is_whole
        and head.count(b"\n") > MANY_LINES
        and not _holds(make_finder(), head)
    ):
        return
    if is_short and not is_whole:
        dropped = _repeats_of_anchors(head, make_finder)
    else:
        dropped = []
    if is_first and (is_wide or is_short) and not dropped:
        yield from read_lines(cast("IO[bytes]", _Rest(head, stream)))
        return
    if is_short:
        yield from _without(head, dropped, place)
        return
    finder = make_finder()
    if is_first and head.startswith(codecs.BOM_UTF8):
        head = head[3:]
        place.byte = 3
    yield from _blocks(head, stream, _ends_with_pieces(finder) if is_cut else finder.ends, place)


def _is_wide(head: bytes) -> bool:
    """Return whether an input is UTF-16, or has some of it: then it is read line by line."""
    return encoding_of(head)[0].startswith("utf-16") or head.count(0) > _NULLS_RATIO * len(head)


def _holds(finder: Finder, head: bytes) -> bool:
    """Return whether an anchor stands in a short input; colours may part its words."""
    if finder.holds(head):
        return True
    if b"\x1b" not in head:
        return False
    lines = head.decode("utf-8", "surrogateescape").split("\n")
    return finder.holds("\n".join(map(strip_escapes, lines)).encode("utf-8", "surrogateescape"))


def _ends_with_pieces(finder: Finder) -> Ends:
    """Return what finds the ends of anchors, and of the tags of pieces: lines around these are
    wanted too.
    """
    return lambda block: [*finder.ends(block), *(found.end() for found in _PIECE.finditer(block))]


def _blocks(
    head: bytes, stream: IO[bytes], ends: Ends, place: InputPosition
) -> Iterator[Line | Gap]:
    """Read block after block into two buffers that take turns: nothing of a healthy log is copied
    or kept.
    """
    buffer = bytearray(head)
    lo = 0
    hi = len(head)
    owed = 0
    repeats = Repeats()
    spare = bytearray(REACH_BYTES + BLOCK_BYTES)
    while hi > lo:
        more = _fill(stream, memoryview(spare)[REACH_BYTES:])
        if more:
            keep = _tail(buffer, lo, hi)
        else:
            keep = 0
        owed = yield from _block(buffer, lo, hi, hi - keep, place, ends, owed, repeats)
        spare[REACH_BYTES - keep : REACH_BYTES] = buffer[hi - keep : hi]
        buffer, spare = spare, buffer if len(buffer) == len(spare) else bytearray(len(spare))
        lo = REACH_BYTES - keep
        hi = REACH_BYTES + more


def _fill(stream: IO[bytes], view: memoryview) -> int:
    """Read until the view is full or the stream ends; return how many bytes came."""
    filled = 0
    while filled < len(view):
        if hasattr(stream, "readinto"):
            count = stream.readinto(view[filled:])
        else:
            data = stream.read(len(view) - filled)
            count = len(data)
            view[filled : filled + count] = data
        if not count:
            break
        filled += count
    return filled


def _tail(block: bytearray, lo: int, hi: int) -> int:
    """Return how many bytes at the end of a block are searched again with the next: the last lines,
    whole if possible.
    """
    least = max(lo, hi - REACH_BYTES)
    end = hi
    for _ in range(LINES_BEFORE + 1):
        at = block.rfind(b"\n", least, end)
        if at < 0:
            break
        end = at
    if end < hi:
        cut = end + 1
    else:
        cut = least
    return min(hi - cut, (hi - lo) // 2)


def _block(
    block: bytearray,
    lo: int,
    hi: int,
    limit: int,
    place: InputPosition,
    ends_in: Ends,
    owed: int,
    repeats: Repeats,
) -> Generator[Line | Gap, None, int]:
    """Yield the wanted lines that begin before ``limit``; return how many the next block owes.

    Bytes from ``limit`` on come again at the head of the next block; ``owed`` is what the block
    before returned.
    """
    done = lo
    beyond = 0
    around = []
    ends, dropped = _ends_and_dropped(block, lo, hi, ends_in, repeats)
    for end in ends:
        stop, missing = _behind(block, hi, lo + end)
        around.append((_backward(block, lo, lo + end, LINES_BEFORE), stop))
        beyond = max(beyond, missing)
    regions = _merged(around)
    if dropped:
        regions = without(regions, dropped)
    if owed:
        regions = _merged([(lo, _forward(block, hi, lo, owed)), *regions])
    for start, stop in regions:
        if start >= limit:
            break
        left_out = 0
        if start > done:
            before = place.line
            _count(block, done, start, place)
            if any(done <= begin < start for begin, _ in dropped):
                left_out = place.line - before
            else:
                left_out = 0
            done = start
        if not (owed and start == lo):
            yield Gap(repeats=left_out)
        end = min(stop, limit)
        yield from _lines(bytes(block[done:end]), place)
        done = end
    # The last region that reaches over the limit tells how many more lines are wanted.
    left = next((stop for start, stop in reversed(regions) if start < limit < stop), None)
    if done < limit:
        _count(block, done, limit, place)
    if left is None:
        return 0
    return block.count(b"\n", limit, left) + 1 + beyond


def _ends_and_dropped(
    block: bytearray, lo: int, hi: int, ends_in: Ends, repeats: Repeats
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ends of the anchors that are to be read, from ``lo``, and the stretches of mere
    repeats.

    Repeats are looked for where the block before was full of anchors, or this one is.
    """
    view = memoryview(block)
    if repeats.are_many:
        ends = []
    else:
        ends = ends_in(view[lo:hi])
    if not repeats.are_many and len(ends) <= LEAST_RUN:
        return ends, []
    first = block.find(b"\n", lo, hi) + 1 or hi
    dropped = [
        (first + start, first + stop) for start, stop in repeats.dropped(bytes(view[first:hi]))
    ]
    ends = [
        at - lo + end for at, stop in without([(lo, hi)], dropped) for end in ends_in(view[at:stop])
    ]
    repeats.are_many = bool(dropped)
    return ends, dropped


def _repeats_of_anchors(head: bytes, make_finder: Callable[[], Finder]) -> list[tuple[int, int]]:
    """Return the stretches of mere repeats in a short input that is full of anchors; none in any
    other.
    """
    if head.count(b"\n") > LEAST_RUN:
        dropped = Repeats().dropped(head)
    else:
        dropped = []
    if dropped and len(make_finder().ends(memoryview(head))) > LEAST_RUN:
        return dropped
    return []


def _without(
    head: bytes, dropped: list[tuple[int, int]], place: InputPosition
) -> Iterator[Line | Gap]:
    """Yield the lines of a short input without stretches of mere repeats."""
    done = 0
    for start, stop in [*dropped, (len(head), len(head))]:
        yield from _lines(head[done:start], place)
        if start < stop:
            yield Gap(repeats=head.count(b"\n", start, stop))
            _count(head, start, stop, place)
        done = stop


def _behind(block: bytearray, hi: int, end: int) -> tuple[int, int]:
    """Return where the wanted lines behind an anchor stop, behind a traceback that begins there,
    and how many lie in the next block.
    """
    lines = LINES_AFTER
    stop = _forward(block, hi, end, lines)
    if block.find(_TRACEBACK, end, stop) >= 0:
        lines = TRACEBACK_LINES
        stop = _forward(block, hi, end, lines)
    return stop, lines - block.count(b"\n", end, hi) if stop == hi else 0


def _merged(regions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(regions):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _backward(block: bytearray, lo: int, end: int, lines: int) -> int:
    """Return where the line begins that stands ``lines`` before the one that holds ``end``."""
    at = max(lo, end - 1)
    for _ in range(lines + 1):
        found = block.rfind(b"\n", max(lo, at - REACH_BYTES), at)
        if found < 0:
            return max(lo, at - REACH_BYTES)
        at = found
    return at + 1


def _forward(block: bytearray, hi: int, start: int, lines: int) -> int:
    """Return the position behind the line that stands ``lines`` after the one at ``start``."""
    at = start
    for _ in range(lines + 1):
        found = block.find(b"\n", at, min(hi, at + REACH_BYTES))
        if found < 0:
            return min(hi, at + REACH_BYTES)
        at = found + 1
    return at


def _count(block: bytes | bytearray, start: int, stop: int, place: InputPosition) -> None:
    """Move the place over bytes that nobody looks into."""
    if stop > start:
        place.line += block.count(b"\n", start, stop)
        place.byte += stop - start
        place.inside = block[stop - 1 : stop] != b"\n"


def _lines(region: bytes, place: InputPosition) -> Iterator[Line]:
    splitter = LineSplitter("utf-8", place.byte, first_line=place.line, inside=place.inside)
    yield from splitter.feed(region, final=True)
    _count(region, 0, len(region), place)


class _Rest:
    """A stream with the first bytes, read already, given back."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int) -> bytes:
        if self._head:
            head = self._head[:size]
            self._head = self._head[size:]
            return head
        return self._stream.read(size)
