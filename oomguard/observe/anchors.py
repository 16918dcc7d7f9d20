"""Find where a block of bytes holds an anchor of any signature: one pass for all anchors at once.

The multi-pattern library (hyperscan) has wheels for Linux on x86-64 only; elsewhere a slower, plain scanner finds the
same places. A test holds that the two agree.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from oomguard.user_files import keep, kept_file

# Between two words of an anchor: a space, or a line break with the marks of a document or a comment around it. Narrow
# on purpose: the multi-pattern library is twice as slow with unbounded white space.
GAP: Final = rb"(?: |[ \r]?\n[ \t#>|*]{0,8}|\\n)"
# The same in a text of which no line break has anything around it, and what tells that one has: half as slow again.
_BARE_GAP: Final = rb"(?: |\n|\\n)"
_MARKED_BREAK: Final = rb"[ \r]\n|\n[ \t#>|*]"
# The plain finder looks for words of at least this length, and this far back for the words before them.
_KEY_CHARS: Final = 6
_HEAD_BYTES: Final = 4096
# A word, with what stands before it and behind it in each of its anchors.
_Groups = dict[bytes, list[tuple[re.Pattern[bytes] | None, re.Pattern[bytes]]]]


class Finder(Protocol):
    """Finds where anchors end in a block; ``name`` says which library looks."""

    name: str

    def ends(self, block: bytes | memoryview) -> list[int]:
        """Return the offset behind each anchor found, in rising order."""
        ...

    def holds(self, block: bytes | memoryview) -> bool:
        """Return whether the block holds an anchor; quicker than ``ends``, since the first one is enough."""
        ...


def flexible(anchor: str) -> bytes:
    """Return an anchor as a pattern over bytes in which each space, or row of spaces, may be a line break."""
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
        anchors: what is looked for.
        plain: ask for the finder without a library.
    """
    wanted = tuple(sorted(set(anchors)))
    if not plain and fast_scanning():
        try:
            return _fast(wanted)
        except Exception:  # noqa: BLE001 - a processor without SSSE3, a broken wheel: the plain finder does the same job
            return _plain(wanted)
    return _plain(wanted)


@functools.lru_cache(maxsize=4)
def _fast(anchors: tuple[str, ...]) -> Finder:
    return _FastFinder(anchors)


@functools.lru_cache(maxsize=4)
def _plain(anchors: tuple[str, ...]) -> Finder:
    return _PlainFinder(anchors)


class _FastFinder:
    """All anchors in one automaton of hyperscan, and in a quicker one for blocks whose lines begin at their first column."""

    name = "hyperscan"

    def __init__(self, anchors: tuple[str, ...]) -> None:
        patterns = [flexible(anchor) for anchor in anchors]
        bare = [pattern.replace(GAP, _BARE_GAP) for pattern in patterns]
        self._bare = _Automaton(bare)
        self._any = functools.cache(lambda: _Automaton(patterns))  # loaded for the first block that needs it
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
    """Patterns that hyperscan compiled, kept between runs, and whether a block has a marked break."""

    def __init__(self, patterns: list[bytes]) -> None:
        import hyperscan

        self._one_at_a_time = threading.Lock()  # the library's scratch memory serves one scan
        self._ended = hyperscan.ScanTerminated
        self._mark = len(patterns)
        kept = kept_file("anchors-{}.hsdb", _cache_key(patterns))
        try:
            self._database = hyperscan.loadb(kept.read_bytes(), hyperscan.HS_MODE_BLOCK)
        except Exception:  # noqa: BLE001 - not cached yet, of another processor, or damaged: compile it
            self._database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
            self._database.compile(
                expressions=[*patterns, _MARKED_BREAK],
                ids=list(range(len(patterns) + 1)),
                elements=len(patterns) + 1,
                flags=[*[0] * len(patterns), hyperscan.HS_FLAG_SINGLEMATCH],
            )
            keep(kept, hyperscan.dumpb(self._database))
        self._database.scratch = hyperscan.Scratch(self._database)

    def scan(self, block: bytes | memoryview, *, first: bool = False) -> tuple[set[int], bool]:
        """Return where anchors end, and whether a line break is marked; with ``first`` stop at the first anchor."""
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
    """Return the key of the cached automaton, which takes longer to compile than a short log takes to read."""
    import platform

    import hyperscan

    versions = (str(vars(hyperscan)["__version__"]), platform.machine())
    return [*(word.encode() for word in versions), _MARKED_BREAK, *patterns]


class _PlainFinder:
    """``bytes.find`` for one word of each anchor, then a pattern for the rest on both sides of it."""

    name = "plain"

    def __init__(self, anchors: tuple[str, ...]) -> None:
        self._groups: _Groups = {
            key.encode(): [_around(key, anchor) for anchor in group] for key, group in _keys(anchors)
        }

    def ends(self, block: bytes | memoryview) -> list[int]:
        return sorted(_ends(bytes(block), self._groups))

    def holds(self, block: bytes | memoryview) -> bool:
        return bool(self.ends(block))


def _ends(block: bytes, groups: _Groups) -> set[int]:
    found: set[int] = set()
    for key, sides in groups.items():
        at = block.find(key)
        while at >= 0:
            for head, tail in sides:
                behind = tail.match(block, at + len(key))
                if behind and (head is None or head.search(block, max(0, at - _HEAD_BYTES), at)):
                    found.add(behind.end())
            at = block.find(key, at + 1)
    return found


def _keys(anchors: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield words that together cover all anchors, each with its anchors: a word that many share is looked for once."""
    left = dict.fromkeys(anchors)
    while left:
        longest = {anchor: max(map(len, anchor.split())) for anchor in left}
        # A short word ("of") is everywhere in a log: it stands for an anchor only if the anchor has no longer one.
        words = {word for a in left for word in a.split() if len(word) >= min(_KEY_CHARS, longest[a])}
        shared = Counter({word: sum(word in anchor for anchor in left) for word in words})
        key = max(words, key=lambda word: (len(word) >= _KEY_CHARS, shared[word], len(word), word))
        group = [anchor for anchor in left if key in anchor]
        yield key, group
        for anchor in group:
            del left[anchor]


def _around(key: str, anchor: str) -> tuple[re.Pattern[bytes] | None, re.Pattern[bytes]]:
    """Return patterns for what stands before the key in an anchor (None: nothing) and behind it."""
    head, _, tail = anchor.strip().partition(key)
    before = re.compile(rb"(?:%s)\Z" % _joined(head)) if head else None
    return before, re.compile(_joined(tail))
