"""Find anchors in a block of bytes: one pass for the anchors of all signatures.

The multi-pattern library (hyperscan) has wheels only for Linux on x86-64. Elsewhere a slower
scanner in Python finds the same positions. A test checks that both agree.
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
_GAP_BYTES: Final = 11  # the maximum length of GAP
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
        self._by_last_byte: dict[int, list[tuple[bytes, bytes]]] = {}  # the first words of anchors
        self._reach_bytes = 0  # after the line in which an anchor begins
        for anchor in anchors:
            self._add(anchor)
        self._inside = anchor_index(tuple(self._by_shape)).inside
        self._candidates: dict[
            bytes, tuple[bytes, ...]
        ] = {}  # shapes that may contain or begin an anchor
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
        shapes[-1] += b"\n"  # the block ends here, so no anchor continues
        judged = {shape: self._judge(shape) for shape in set(shapes) - self._harmless}
        wanted = {shape: anchors for shape, anchors in judged.items() if anchors}
        numbers = [number for number, shape in enumerate(shapes) if shape in wanted]
        if (
            len(numbers) > _FEW_LINES
        ):  # checking each would take longer than searching the whole block
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
    """Yield the ends of matches that begin in ``start`` to ``stop`` and end before ``limit``."""
    match = pattern.search(block, start, limit)
    while match and match.start() < stop:
        yield match.end()
        match = pattern.search(block, match.start() + 1, limit)
