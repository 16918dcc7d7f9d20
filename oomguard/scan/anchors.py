"""Find where a block of bytes holds an anchor of any signature: one pass for all anchors at once.

The multi-pattern library (hyperscan) has wheels for Linux on x86-64 only; elsewhere a slower, plain
scanner finds the same places. A test holds that the two agree.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import threading
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from typing import Final, Protocol

from oomguard.core.files import cache_file, write_cache

# Which of many literals a line holds, by three of their characters.
#
# A short input is not worth a search automaton (anchors.py), and asking a line for each of some
# hundred literals takes longer than all the rest. A line has one set of threes; a literal is looked
# for only where its own is among them. Its own is the first that begins with a character which few
# lines hold, else the one in its middle.

_THREE: Final = 3
_RARE: Final = re.compile(r"[A-Zjqxz_/(\[\]=:\\*]..|[kvwyfb][^aeiou ].")


class AnchorIndex:
    """Literals by three characters of each; those that are shorter are looked for in every line."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        self._by_three: dict[str, list[str]] = {}
        self._short: list[str] = []
        for literal in dict.fromkeys(literals):
            if len(literal) < _THREE:
                self._short.append(literal)
            else:
                self._by_three.setdefault(_own_three(literal), []).append(literal)

    def inside(self, text: str) -> list[str]:
        """Return the literals that a text holds, in no particular order."""
        found = [literal for literal in self._short if literal in text]
        by_three = self._by_three
        for three in {text[at : at + _THREE] for at in range(len(text) - _THREE + 1)}:
            if three in by_three:
                found += [literal for literal in by_three[three] if literal in text]
        return found


def _own_three(literal: str) -> str:
    rare = _RARE.search(literal, 1)
    middle = max(0, len(literal) // 2 - 1)
    if rare:
        return rare.group()
    return literal[middle : middle + _THREE]


@functools.lru_cache(maxsize=8)
def anchor_index(literals: tuple[str, ...]) -> AnchorIndex:
    """Return the index of these literals, made once."""
    return AnchorIndex(literals)


# Between two words of an anchor: a space, or a line break with the marks of a document or a comment
# around it. Narrow on purpose: the multi-pattern library is twice as slow with unbounded white
# space.
GAP: Final = rb"(?: |[ \r]?\n[ \t#>|*]{0,8}|\\n)"
# The same in a text of which no line break has anything around it, and what tells that one has:
# half as slow again.
_BARE_GAP: Final = rb"(?: |\n|\\n)"
_MARKED_BREAK: Final = rb"[ \r]\n|\n[ \t#>|*]"
# What the plain finder makes alike: digits and the letters of hexadecimal numbers.
_HEXADECIMAL: Final = b"0123456789abcdefABCDEF"
_ALIKE: Final = bytes.maketrans(_HEXADECIMAL, b"0" * len(_HEXADECIMAL))
# So many shapes of lines are remembered, of lines that are not longer than this.
_MAX_SHAPES: Final = 50_000
_MAX_SHAPE_BYTES: Final = 2000
_GAP_BYTES: Final = 11  # GAP matches no more
_FEW_LINES: Final = 2000


class Finder(Protocol):
    """Finds where anchors end in a block; ``name`` says which library looks."""

    name: str

    def ends(self, block: bytes | memoryview) -> list[int]:
        """Return the offset behind each anchor found, in rising order."""
        ...

    def holds(self, block: bytes | memoryview) -> bool:
        """Return whether the block holds an anchor; quicker than ``ends``, since the first one is
        enough.
        """
        ...


def flexible(anchor: str) -> bytes:
    """Return an anchor as a pattern over bytes in which each space, or row of spaces, may be a line
    break.
    """
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
        anchors: the literals to look for.
        plain: ask for the finder without a library.
    """
    wanted = tuple(sorted(set(anchors)))
    if not plain and fast_scanning():
        try:
            return _fast(wanted)
        except Exception:  # noqa: BLE001
            # a processor without SSSE3, a broken wheel: the plain finder does the same job
            return _plain(wanted)
    return _plain(wanted)


@functools.lru_cache(maxsize=4)
def _fast(anchors: tuple[str, ...]) -> Finder:
    return _FastFinder(anchors)


@functools.lru_cache(maxsize=4)
def _plain(anchors: tuple[str, ...]) -> Finder:
    return _PlainFinder(anchors)


class _FastFinder:
    """All anchors in one automaton of hyperscan, and in a quicker one for blocks whose lines begin
    at their first column.
    """

    name = "hyperscan"

    def __init__(self, anchors: tuple[str, ...]) -> None:
        patterns = [flexible(anchor) for anchor in anchors]
        bare = [pattern.replace(GAP, _BARE_GAP) for pattern in patterns]
        self._bare = _Automaton(bare)
        self._any = functools.cache(
            lambda: _Automaton(patterns)
        )  # loaded for the first block that needs it
        self._marked = False  # the block before had a marked break, so this one will

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
    """Patterns that hyperscan compiled, kept between runs, and whether a block has a
    marked break.
    """

    def __init__(self, patterns: list[bytes]) -> None:
        import hyperscan

        self._one_at_a_time = threading.Lock()  # the library's scratch memory serves one scan
        self._ended = hyperscan.ScanTerminated
        self._mark = len(patterns)
        kept = cache_file("anchors-{}.hsdb", _cache_key(patterns))
        try:
            self._database = hyperscan.loadb(kept.read_bytes(), hyperscan.HS_MODE_BLOCK)
        except Exception:  # noqa: BLE001
            # not cached yet, of another processor, or damaged: compile it
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
        """Return where anchors end, and whether a line break is marked; with ``first`` stop at the
        first anchor.
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
    """Return the key of the cached automaton, which takes longer to compile than a short log takes
    to read.
    """
    import platform

    import hyperscan

    versions = (str(vars(hyperscan)["__version__"]), platform.machine())
    return [*(word.encode() for word in versions), _MARKED_BREAK, *patterns]


class _PlainFinder:
    """Without a library: looks once at each shape of line, because a long log repeats the same few
    shapes.

    The shape of a line is the line with all digits and hexadecimal letters made alike: times,
    counters and request numbers no longer differ. If an anchor is in a line, the shape of the
    anchor is in the shape of the line, so the bytes of a line are searched only if its shape may
    hold an anchor, or ends in the first words of one that may go on in the next line.
    """

    name = "plain"

    def __init__(self, anchors: tuple[str, ...]) -> None:
        self._patterns: dict[bytes, re.Pattern[bytes]] = {}
        self._words: dict[bytes, list[bytes]] = {}
        self._by_shape: dict[str, list[bytes]] = {}
        self._by_last_byte: dict[int, list[tuple[bytes, bytes]]] = {}  # the first words of anchors
        self._reach_bytes = 0  # behind the line in which an anchor begins
        for anchor in anchors:
            self._add(anchor)
        self._inside = anchor_index(tuple(self._by_shape)).inside
        self._candidates: dict[
            bytes, tuple[bytes, ...]
        ] = {}  # of the shapes that may hold or begin an anchor
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
        shapes[-1] += b"\n"  # nothing of this block follows it, so no anchor goes on behind it
        judged = {shape: self._judge(shape) for shape in set(shapes) - self._harmless}
        wanted = {shape: anchors for shape, anchors in judged.items() if anchors}
        numbers = [number for number, shape in enumerate(shapes) if shape in wanted]
        if (
            len(numbers) > _FEW_LINES
        ):  # looking into each would take longer than looking for words in the whole block
            possible = set(chain.from_iterable(wanted.values()))
            absent = {
                anchor
                for anchor in possible
                if not all(word in block for word in self._words[anchor])
            }
            wanted = {shape: tuple(set(anchors) - absent) for shape, anchors in wanted.items()}
            numbers = [number for number in numbers if wanted[shapes[number]]]
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
        """Return the anchors that a line of this shape may hold or begin, and remember them."""
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
        found = {
            anchor for one in self._inside(text.decode("latin-1")) for anchor in self._by_shape[one]
        }
        if text and not shape.endswith(b"\n"):
            found.update(
                anchor
                for words, anchor in self._by_last_byte.get(text[-1], ())
                if text.endswith(words)
            )
        return tuple(found)


def _ends_of(
    pattern: re.Pattern[bytes], block: bytes, start: int, stop: int, limit: int
) -> Iterator[int]:
    """Yield where the pattern ends, before ``limit``, if it begins from ``start`` up to
    ``stop``.
    """
    match = pattern.search(block, start, limit)
    while match and match.start() < stop:
        yield match.end()
        match = pattern.search(block, match.start() + 1, limit)
