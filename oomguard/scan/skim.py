"""Read only the relevant lines of a huge input: near an anchor, with numbers and offsets.

The search works on blocks of bytes before they become lines. Lines far from any anchor are counted
and dropped.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import IO, Final, NamedTuple, cast

from oomguard.core.text import strip_escapes
from oomguard.scan.anchors import Finder
from oomguard.scan.log_prefixes import TRACEBACK
from oomguard.scan.source import Line, LineSplitter, encoding_of, read_lines

# Repeated lines are counted and not read after the first ones.
#
# A server that catches each failure may print it a hundred thousand times, and each costs as much
# to read as the first.

# The number of lines to read per shape, because hundreds of processes or restarts differ in numbers
# only. A later run of repeats is read at its beginning and end to this extent.
KEPT: Final = 600
EDGE: Final = 10
LEAST_RUN: Final = 120
_MOST_SHAPES: Final = 20_000
# Numbers and identifiers differ between repeats, in length too.
_DIGITS: Final = b"0123456789abcdef"


class Repeats:
    """Track the shapes of lines in one input.

    Attributes:
        are_many: whether the previous part had repeats.
    """

    def __init__(self) -> None:
        self.are_many = False
        self._counts: dict[bytes, int] = {}

    def dropped(self, data: bytes) -> list[tuple[int, int]]:
        """Return the stretches of whole lines, as offsets, that only repeat earlier ones."""
        counts = self._counts
        found = []
        if len(counts) > _MOST_SHAPES:
            counts.clear()
        starts = [0]
        begin = -1
        number = 0
        at = 0
        shapes = data.translate(None, _DIGITS).split(b"\n")
        for line, shape in zip(data.split(b"\n"), shapes, strict=True):
            at += len(line) + 1
            starts.append(at)
            seen = counts[shape] = counts.get(shape, 0) + 1
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
    """Return sorted regions without the dropped stretches."""
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
# A shorter input is read line by line, which is faster than preparing the finder, unless it has
# many lines.
SHORT_BYTES: Final = 1 << 18
MANY_LINES: Final = 4000
LINES_BEFORE: Final = 6
LINES_AFTER: Final = 24
# A traceback ends with its exception, so this many lines may follow an anchor that one begins
# after.
TRACEBACK_LINES: Final = 400
_TRACEBACK: Final = TRACEBACK.encode()
# A line extends at most this far around an anchor; a longer one is cut, as everywhere.
REACH_BYTES: Final = 1 << 16
# A container runtime cuts long lines, and anchors with them (``split_lines``).
_RUNTIME: Final = re.compile(
    rb'^(?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) std(?:out|err) [PF]|\{[^\n]*"(?:logtag|_p)":\s?"[PF]")',
    re.MULTILINE,
)
_PIECE: Final = re.compile(rb' std(?:out|err) P(?::\S*)? |"(?:logtag|_p)":\s?"P"')
# With this many null bytes a part is UTF-16, in which a search of bytes finds no anchors.
_NULLS_RATIO: Final = 0.01
Ends = Callable[[memoryview], list[int]]


class Gap(NamedTuple):
    """Mark omitted lines: the next line does not continue the last one.

    Attributes:
        repeats: how many of them only repeat earlier lines.
    """

    repeats: int = 0


@dataclass(slots=True)
class InputPosition:
    """Track the next line, the offset of the next byte, and whether it is inside the line."""

    line: int = 1
    byte: int = 0
    inside: bool = False


def skim(
    stream: IO[bytes], make_finder: Callable[[], Finder], start: InputPosition | None = None
) -> Iterator[Line | Gap]:
    """Yield the lines near an anchor in constant memory, with a ``Gap`` before each group.

    A short input comes whole. If it has many lines without an anchor, nothing comes.

    Args:
        stream: the unpacked input.
        make_finder: creates the finder of anchors; called only for an input that is long or has
            many lines.
        start: the position in a longer input; None for its beginning.
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
    """Return whether an input contains UTF-16 and must be read line by line."""
    return encoding_of(head)[0].startswith("utf-16") or head.count(0) > _NULLS_RATIO * len(head)


def _holds(finder: Finder, head: bytes) -> bool:
    """Return whether a short input contains an anchor; color codes may separate its words."""
    if finder.holds(head):
        return True
    if b"\x1b" not in head:
        return False
    lines = head.decode("utf-8", "surrogateescape").split("\n")
    return finder.holds("\n".join(map(strip_escapes, lines)).encode("utf-8", "surrogateescape"))


def _ends_with_pieces(finder: Finder) -> Ends:
    """Return a function that finds the ends of anchors and of tags for cut lines."""
    return lambda block: [*finder.ends(block), *(found.end() for found in _PIECE.finditer(block))]


def _blocks(
    head: bytes, stream: IO[bytes], ends: Ends, place: InputPosition
) -> Iterator[Line | Gap]:
    """Read blocks into two alternating buffers, so a healthy log is neither copied nor stored."""
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
    """Read until the view is full or the stream ends; return the number of bytes."""
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
    """Return how many last bytes to search again with the next block, in whole lines if
    possible.
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

    Bytes from ``limit`` on come again in the next block. ``owed`` is the result of the previous
    block.
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
            if any(begin < start and done < behind for begin, behind in dropped):
                left_out = place.line - before
            else:
                left_out = 0
            done = start
        if not (owed and start == lo):
            yield Gap(repeats=left_out)
        end = min(stop, limit)
        yield from _lines(bytes(block[done:end]), place)
        done = end
    # The last region beyond the limit decides how many more lines are wanted.
    left = next((stop for start, stop in reversed(regions) if start < limit < stop), None)
    if done < limit:
        _count(block, done, limit, place)
    if left is None:
        return 0
    return block.count(b"\n", limit, left) + 1 + beyond


def _ends_and_dropped(
    block: bytearray, lo: int, hi: int, ends_in: Ends, repeats: Repeats
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ends of anchors to read, from ``lo``, and the stretches of repeats.

    The search for repeats runs if this block or the previous one is full of anchors.
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
    """Return the stretches of repeats in a short input full of anchors; else nothing."""
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
    """Yield the lines of a short input without stretches of repeats."""
    done = 0
    for start, stop in [*dropped, (len(head), len(head))]:
        yield from _lines(head[done:start], place)
        if start < stop:
            yield Gap(repeats=head.count(b"\n", start, stop))
            _count(head, start, stop, place)
        done = stop


def _behind(block: bytearray, hi: int, end: int) -> tuple[int, int]:
    """Return the end of the wanted lines after an anchor, and how many are in the next block.

    A traceback that begins there is included.
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
    """Return the start of the line that is ``lines`` before the one at ``end``."""
    at = max(lo, end - 1)
    for _ in range(lines + 1):
        found = block.rfind(b"\n", max(lo, at - REACH_BYTES), at)
        if found < 0:
            return max(lo, at - REACH_BYTES)
        at = found
    return at + 1


def _forward(block: bytearray, hi: int, start: int, lines: int) -> int:
    """Return the end of the line that is ``lines`` after the one at ``start``."""
    at = start
    for _ in range(lines + 1):
        found = block.find(b"\n", at, min(hi, at + REACH_BYTES))
        if found < 0:
            return min(hi, at + REACH_BYTES)
        at = found + 1
    return at


def _count(block: bytes | bytearray, start: int, stop: int, place: InputPosition) -> None:
    """Advance the position over skipped bytes."""
    if stop > start:
        place.line += block.count(b"\n", start, stop)
        place.byte += stop - start
        place.inside = block[stop - 1 : stop] != b"\n"


def _lines(region: bytes, place: InputPosition) -> Iterator[Line]:
    splitter = LineSplitter("utf-8", place.byte, first_line=place.line, inside=place.inside)
    yield from splitter.feed(region, final=True)
    _count(region, 0, len(region), place)


class _Rest:
    """Provide a stream together with its first bytes, which were already read."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int) -> bytes:
        if self._head:
            head = self._head[:size]
            self._head = self._head[size:]
            return head
        return self._stream.read(size)
