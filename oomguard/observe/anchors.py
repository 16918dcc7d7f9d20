"""Where a block of bytes holds any anchor of any signature: one pass over all anchors at once.

The multi-pattern library (hyperscan) has wheels for Linux on x86-64 only; elsewhere a plain scanner finds the same
places, slower. A test holds that the two agree.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Iterable
from typing import Final, Protocol

# Between two words of an anchor: white space, a wrapped line's quotation or comment mark, an escaped line break.
GAP: Final = rb"(?:[\s#>|*]|\\n)+"


class Finder(Protocol):
    """Where the anchors end in a block, in rising order; ``name`` says which library looks."""

    name: str

    def ends(self, block: bytes) -> list[int]:
        """Offsets just behind each anchor found."""
        ...


def flexible(anchor: str) -> bytes:
    """An anchor as a pattern over bytes in which each space may be a line break."""
    return GAP.join(re.escape(word.encode()) for word in anchor.split(" ") if word)


def fast_scanning() -> bool:
    """Whether the multi-pattern library can be used here."""
    return importlib.util.find_spec("hyperscan") is not None


def finder(anchors: Iterable[str], *, plain: bool = False) -> Finder:
    """The fastest finder there is for these anchors; ``plain`` asks for the one without a library."""
    wanted = tuple(sorted(set(anchors)))
    if not plain and fast_scanning():
        try:
            return _fast(wanted)
        except Exception:  # noqa: BLE001 - a processor without SSSE3, a broken wheel: the plain scanner does the same job
            return _plain(wanted)
    return _plain(wanted)


@functools.lru_cache(maxsize=4)
def _fast(anchors: tuple[str, ...]) -> Finder:
    return _FastFinder(anchors)


@functools.lru_cache(maxsize=4)
def _plain(anchors: tuple[str, ...]) -> Finder:
    return _PlainFinder(anchors)


class _FastFinder:
    """All anchors in one automaton of hyperscan."""

    name = "hyperscan"

    def __init__(self, anchors: tuple[str, ...]) -> None:
        import hyperscan

        self._database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        patterns = [flexible(anchor) for anchor in anchors]
        self._database.compile(expressions=patterns, ids=list(range(len(patterns))), elements=len(patterns), flags=0)

    def ends(self, block: bytes) -> list[int]:
        found: set[int] = set()

        def note(_id: int, _start: int, end: int, _flags: int, _context: object) -> None:
            found.add(end)

        self._database.scan(block, match_event_handler=note)
        return sorted(found)


class _PlainFinder:
    """``bytes.find`` for one word of each anchor, then the whole anchor around it."""

    name = "plain"

    def __init__(self, anchors: tuple[str, ...]) -> None:
        words: Counter[bytes] = Counter(word for a in anchors for word in {w.encode() for w in a.split(" ")})
        self._groups: dict[bytes, list[tuple[re.Pattern[bytes], int]]] = {}
        for anchor in anchors:
            # A long word is rare in a log, and one that several anchors share is looked for once.
            word = max((w.encode() for w in anchor.split(" ")), key=lambda w: (len(w) + 2 * words[w], w))
            self._groups.setdefault(word, []).append((re.compile(flexible(anchor)), len(anchor)))

    def ends(self, block: bytes) -> list[int]:
        found: set[int] = set()
        for word, anchors in self._groups.items():
            at = block.find(word)
            while at >= 0:
                for pattern, length in anchors:
                    reach = 2 * length + 200
                    start = max(0, at - reach)
                    region = block[start : at + len(word) + reach]
                    found |= {start + m.end() for m in pattern.finditer(region)}
                at = block.find(word, at + len(word))
        return sorted(found)
