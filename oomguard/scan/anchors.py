"""Find the anchors of all signatures in bytes, and read only the lines near them.

The search works on blocks of bytes before they become lines. Lines far from any anchor are counted
and dropped, so a huge log is read in constant memory. The multi-pattern library (hyperscan) has wheels only for Linux on x86-64. Elsewhere a slower
scanner in Python finds the same positions. A test checks that both agree.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import importlib.util
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import IO, Final, Protocol, cast

from oomguard.core.files import cache_file, write_cache
from oomguard.core.text import strip_escapes
from oomguard.scan.lines import TRACEBACK
from oomguard.scan.source import Gap, Line, LineSplitter, encoding_of, read_lines

# A trigram index finds the literals in a line.
#
# For a short input a search automaton is not worth its start-up time, and a search for each of some
# hundred literals takes longer than everything else. A line has one set of trigrams, and a literal
# needs a search only if the set contains its own. Its own is the first that begins with a rare
# character, or else the one in its middle.

_THREE: Final = 3
_RARE: Final = re.compile(r"[A-Zjqxz_/(\[\]=:\\*]..|[kvwyfb][^aeiou ].")


class AnchorIndex:
    """Index literals by one trigram each; every line is searched for shorter literals."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        self._by_three: dict[str, list[str]] = {}
        self._short: list[str] = []
        for literal in dict.fromkeys(literals):
            if len(literal) < _THREE:
                self._short.append(literal)
            else:
                self._by_three.setdefault(_own_three(literal), []).append(literal)

    def inside(self, text: str) -> list[str]:
        """Return the literals in a text, in any order."""
        found = []
        for literal in self._short:
            if literal in text:
                found.append(literal)
        threes = [text[at : at + _THREE] for at in range(len(text) - _THREE + 1)]
        # One intersection is twice as fast as a look-up for each trigram of every line.
        for three in self._by_three.keys() & threes:
            for literal in self._by_three[three]:
                if literal in text:
                    found.append(literal)
        return found


def _own_three(literal: str) -> str:
    rare = _RARE.search(literal, 1)
    middle = max(0, len(literal) // 2 - 1)
    if rare:
        return rare.group()
    return literal[middle : middle + _THREE]


@functools.lru_cache(maxsize=8)
def anchor_index(literals: tuple[str, ...]) -> AnchorIndex:
    """Return the index of these literals, built once."""
    return AnchorIndex(literals)


# Between two words of an anchor: a space, or a line break with the marks of a document or a
# comment. It is narrow because the multi-pattern library is twice as slow with unbounded white
# space.
GAP: Final = rb"(?: |[ \r]?\n[ \t#>|*]{0,8}|\\n)"
# The same for a text whose line breaks have nothing around them, and the check for that. The check
# costs half of the time.
_BARE_GAP: Final = rb"(?: |\n|\\n)"
_MARKED_BREAK: Final = rb"[ \r]\n|\n[ \t#>|*]"
# The Python finder treats these characters as equal: digits and hexadecimal letters.
_HEXADECIMAL: Final = b"0123456789abcdefABCDEF"
_ALIKE: Final = bytes.maketrans(_HEXADECIMAL, b"0" * len(_HEXADECIMAL))
# The finder caches this many line shapes, of lines up to this length.
_MAX_SHAPES: Final = 50_000
_MAX_SHAPE_BYTES: Final = 2000
# The maximum length of GAP.
_GAP_BYTES: Final = 11
_FEW_LINES: Final = 2000


class Finder(Protocol):
    """Find the ends of anchors in a block; ``name`` is the library."""

    name: str

    def ends(self, block: bytes | memoryview) -> list[int]:
        """Return the offset after each found anchor, in ascending order."""
        ...

    def holds(self, block: bytes | memoryview) -> bool:
        """Return whether the block contains an anchor; faster than ``ends``."""
        ...


def flexible(anchor: str) -> bytes:
    """Return an anchor as a pattern over bytes in which spaces may be a line break."""
    return _joined(anchor.strip())


def _joined(words: str) -> bytes:
    parts = re.split("( +)", words)
    gaps = (GAP if gap == " " else b"(?:%s|%s)" % (gap.encode(), GAP) for gap in parts[1::2])
    escaped = (re.escape(word.encode()) for word in parts[::2])
    return next(escaped) + b"".join(gap + word for gap, word in zip(gaps, escaped, strict=True))


def fast_scanning() -> bool:
    """Return whether the multi-pattern library is installed."""
    return importlib.util.find_spec("hyperscan") is not None


def finder(anchors: Iterable[str], *, plain: bool = False) -> Finder:
    """Return the fastest finder.

    Args:
        anchors: the literals to search for.
        plain: whether to use the finder without a library.
    """
    wanted = tuple(sorted(set(anchors)))
    if not plain and fast_scanning():
        try:
            return _fast(wanted)
        except Exception:  # noqa: BLE001
            # A processor without SSSE3 or a broken wheel: the Python finder does the same job.
            return _plain(wanted)
    return _plain(wanted)


@functools.lru_cache(maxsize=4)
def _fast(anchors: tuple[str, ...]) -> Finder:
    return _FastFinder(anchors)


@functools.lru_cache(maxsize=4)
def _plain(anchors: tuple[str, ...]) -> Finder:
    return _PlainFinder(anchors)


class _FastFinder:
    """Search with hyperscan: one automaton for all anchors.

    A faster automaton handles blocks whose lines begin in the first column.
    """

    name = "hyperscan"

    def __init__(self, anchors: tuple[str, ...]) -> None:
        patterns = [flexible(anchor) for anchor in anchors]
        bare = [pattern.replace(GAP, _BARE_GAP) for pattern in patterns]
        self._bare = _Automaton(bare)
        self._any = functools.cache(
            lambda: _Automaton(patterns)
        )  # loaded for the first block that needs it
        # if the previous block had a marked break, this one probably has one too
        self._marked = False

    def ends(self, block: bytes | memoryview) -> list[int]:
        if not self._marked:
            found, marked = self._bare.scan(block)
            if not marked:
                return sorted(found)
        found, self._marked = self._any().scan(block)
        return sorted(found)

    def holds(self, block: bytes | memoryview) -> bool:
        found, marked = self._bare.scan(block, first=True)
        return bool(found or (marked and self._any().scan(block, first=True)[0]))


class _Automaton:
    """Hold the patterns that hyperscan compiled; they are cached between runs."""

    def __init__(self, patterns: list[bytes]) -> None:
        import hyperscan

        # the library's scratch memory serves one scan at a time
        self._one_at_a_time = threading.Lock()
        self._ended = hyperscan.ScanTerminated
        self._mark = len(patterns)
        kept = cache_file("anchors-{}.hsdb", _cache_key(patterns))
        try:
            self._database = hyperscan.loadb(kept.read_bytes(), hyperscan.HS_MODE_BLOCK)
        except Exception:  # noqa: BLE001
            # If the cache is missing, damaged or from another processor, compile again.
            self._database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
            self._database.compile(
                expressions=[*patterns, _MARKED_BREAK],
                ids=list(range(len(patterns) + 1)),
                elements=len(patterns) + 1,
                flags=[*[0] * len(patterns), hyperscan.HS_FLAG_SINGLEMATCH],
            )
            write_cache(kept, hyperscan.dumpb(self._database))
        self._database.scratch = hyperscan.Scratch(self._database)

    def scan(self, block: bytes | memoryview, *, first: bool = False) -> tuple[set[int], bool]:
        """Return the ends of anchors, and whether a line break is marked.

        With ``first`` the scan stops at the first anchor.
        """
        found: set[int] = set()
        marked = False

        def note(number: int, _start: int, end: int, _flags: int, _context: object) -> bool:
            nonlocal marked
            if number == self._mark:
                marked = True
                return False
            found.add(end)
            return first

        with self._one_at_a_time, contextlib.suppress(self._ended):
            self._database.scan(block, match_event_handler=note)  # type: ignore[type-var]
        return found, marked


def _cache_key(patterns: list[bytes]) -> list[bytes]:
    """Return the cache key of the automaton, whose compilation takes longer than a short log."""
    import platform

    import hyperscan

    versions = (str(vars(hyperscan)["__version__"]), platform.machine())
    return [*(word.encode() for word in versions), _MARKED_BREAK, *patterns]


class _PlainFinder:
    """Search without a library: check each line shape once, because long logs repeat shapes.

    A line's shape replaces all digits and hexadecimal letters with one character, so times,
    counters and request numbers no longer differ. If a line contains an anchor, its shape contains
    the anchor's shape. So the finder searches a line only if its shape may contain an anchor, or
    ends with the first words of one that may continue in the next line.
    """

    name = "plain"

    def __init__(self, anchors: tuple[str, ...]) -> None:
        self._patterns: dict[bytes, re.Pattern[bytes]] = {}
        self._words: dict[bytes, list[bytes]] = {}
        self._by_shape: dict[str, list[bytes]] = {}
        # The first words of anchors.
        self._by_last_byte: dict[int, list[tuple[bytes, bytes]]] = {}
        # After the line in which an anchor begins.
        self._reach_bytes = 0
        for anchor in anchors:
            self._add(anchor)
        self._inside = anchor_index(tuple(self._by_shape)).inside
        self._candidates: dict[
            bytes, tuple[bytes, ...]
            # Shapes that may contain or begin an anchor.
        ] = {}
        self._harmless: set[bytes] = set()

    def _add(self, anchor: str) -> None:
        text = anchor.encode()
        words = text.split()
        shapes = [word.translate(_ALIKE) for word in words]
        self._patterns[text] = re.compile(flexible(anchor))
        self._words[text] = sorted(words, key=len, reverse=True)
        self._by_shape.setdefault(b" ".join(shapes).decode("latin-1"), []).append(text)
        for count in range(1, len(shapes)):
            first_words = b" ".join(shapes[:count])
            self._by_last_byte.setdefault(first_words[-1], []).append((first_words, text))
        self._reach_bytes = max(self._reach_bytes, len(text) + _GAP_BYTES * len(words))

    def ends(self, block: bytes | memoryview) -> list[int]:
        block = bytes(block)
        shapes = block.translate(_ALIKE).split(b"\n")
        # The block ends here, so no anchor continues.
        shapes[-1] += b"\n"
        judged = {shape: self._judge(shape) for shape in set(shapes) - self._harmless}
        wanted = {}
        for shape, anchors in judged.items():
            if anchors:
                wanted[shape] = anchors
        numbers = []
        for number, shape in enumerate(shapes):
            if shape in wanted:
                numbers.append(number)
        if (
            len(numbers) > _FEW_LINES
        ):  # checking each would take longer than searching the whole block
            possible = set(chain.from_iterable(wanted.values()))
            absent = set()
            for anchor in possible:
                if not all(word in block for word in self._words[anchor]):
                    absent.add(anchor)
            wanted = {shape: tuple(set(anchors) - absent) for shape, anchors in wanted.items()}
            numbers = list(filter(lambda number: wanted[shapes[number]], numbers))
        found: set[int] = set()
        if numbers:
            stops = list(accumulate(map(len, shapes)))
        else:
            stops = []
        for number in numbers:
            stop = stops[number] + number
            start = stop - len(shapes[number])
            for anchor in wanted[shapes[number]]:
                found.update(
                    _ends_of(self._patterns[anchor], block, start, stop, stop + self._reach_bytes)
                )
        return sorted(found)

    def holds(self, block: bytes | memoryview) -> bool:
        return bool(self.ends(block))

    def _judge(self, shape: bytes) -> tuple[bytes, ...]:
        """Return the anchors that a line of this shape may contain or begin, and cache them."""
        known = self._candidates.get(shape)
        if known is not None:
            return known
        found = self._anchors_for(shape)
        if len(shape) > _MAX_SHAPE_BYTES:
            return found
        if len(self._harmless) + len(self._candidates) >= _MAX_SHAPES:
            self._harmless = set()
            self._candidates = {}
        if found:
            self._candidates[shape] = found
        else:
            self._harmless.add(shape)
        return found

    def _anchors_for(self, shape: bytes) -> tuple[bytes, ...]:
        text = b" ".join(shape.replace(b"\\n", b" ").split())
        found: set[bytes] = set()
        for one in self._inside(text.decode("latin-1")):
            found.update(self._by_shape[one])
        if text and not shape.endswith(b"\n"):
            for words, anchor in self._by_last_byte.get(text[-1], ()):
                if text.endswith(words):
                    found.add(anchor)
        return tuple(found)


def _ends_of(
    pattern: re.Pattern[bytes], block: bytes, start: int, stop: int, limit: int
) -> Iterator[int]:
    """Yield the ends of matches that begin in ``start`` to ``stop`` and end before ``limit``.

    A match may have several ends: in a table, the last word ``|`` is also a mark of a gap.
    """
    match = pattern.search(block, start, limit)
    while match and match.start() < stop:
        begin = match.start()
        # A pattern finds its longest match alone, but the library reports the end of each.
        while match:
            yield match.end()
            match = pattern.match(block, begin, match.end() - 1)
        match = pattern.search(block, begin + 1, limit)


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
# A container runtime cuts long lines, and anchors with them (``scan/lines.py``).
_RUNTIME: Final = re.compile(
    rb'^(?:\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) std(?:out|err) [PF]|\{[^\n]*"(?:logtag|_p)":\s?"[PF]")',
    re.MULTILINE,
)
_PIECE: Final = re.compile(rb' std(?:out|err) P(?::\S*)? |"(?:logtag|_p)":\s?"P"')
# With this many null bytes a part is UTF-16, in which a search of bytes finds no anchors.
_NULLS_RATIO: Final = 0.01
Ends = Callable[[memoryview], list[int]]


@dataclass(slots=True, eq=False, repr=False)
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
    if done < limit:
        _count(block, done, limit, place)
    for start, stop in reversed(regions):
        if start < limit < stop:
            return block.count(b"\n", limit, stop) + 1 + beyond
    return 0


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
    dropped = []
    for start, stop in repeats.dropped(bytes(view[first:hi])):
        dropped.append((first + start, first + stop))
    ends = []
    for at, stop in without([(lo, hi)], dropped):
        for end in ends_in(view[at:stop]):
            ends.append(at - lo + end)
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
