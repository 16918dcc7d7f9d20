"""A phrase of failing for memory weighed by the lexicon: the signs around it, its message, its figures, the nearest kind."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from oomguard.facts import Fact
from oomguard.observe.asked_size import sized
from oomguard.observe.hits import CLAUSE_CHARS, Hit, quoted
from oomguard.observe.search_time import SearchTime
from oomguard.observe.title import is_title, mark_chars
from oomguard.observe.window import Window
from oomguard.observe.word_signs import word_signs
from oomguard.rules.lexicon import Lexicon
from oomguard.rules.signature import Quotation, Signature, Wording

# What stands so far around a phrase speaks of it.
LINE_CHARS: Final = 500
BELOW_LINES: Final = 4
ABOVE_CHARS: Final = 1200
_PHRASES_A_LINE: Final = 3
_MOST_ODDS: Final = 50.0
_MESSAGE_CHARS: Final = 300
_WORDING: Final = Wording(anchor="", pattern=None, source="the lexicon")
_SIGNATURE: Final = Signature("", "other", "unknown", "unknown", (_WORDING,), ())
Slow = Callable[[Quotation], None]


@dataclass(frozen=True, slots=True)
class Judged:
    """A phrase that was weighed.

    Attributes:
        certainty_ratio: how sure it is that it tells a failure.
        signs: which features were found, in the lexicon's order.
        words: the signs of words, of which the lexicon weighs those that it knows.
        hit: the message as a signature would have found it.
    """

    certainty_ratio: float
    signs: tuple[bool, ...]
    words: frozenset[str]
    hit: Hit


def judged(
    lexicon: Lexicon, window: Window, quotations: tuple[Quotation, ...], time: SearchTime, slow: Slow
) -> Judged | None:
    """Weigh the first phrase on the anchor's line that is no quotation; None where none is, or a search takes too long."""
    try:
        for found in _phrases(lexicon, window, time):
            parts = _parts(window, found)
            if _is_harmless(lexicon, parts, time):
                continue
            hit = message_of(lexicon, window, found, time)
            if quoted(hit, window, quotations, time, slow) is None:
                return _weighed(lexicon, parts, hit, time)
    except TimeoutError:
        return None
    return None


def _phrases(lexicon: Lexicon, window: Window, time: SearchTime) -> Iterator[Any]:
    begin, end = window.anchor_span
    for _ in range(_PHRASES_A_LINE):
        ways = (time.search(phrase, window.text, pos=begin, endpos=end) for phrase in lexicon.phrases)
        found = min(filter(None, ways), key=lambda one: one.start(), default=None)
        if found is None:
            return
        yield found
        begin = found.end() + 1


def _is_harmless(lexicon: Lexicon, parts: dict[str, str], time: SearchTime) -> bool:
    return any(time.search(pattern, parts[part]) is not None for part, pattern in lexicon.harmless)


def _weighed(lexicon: Lexicon, parts: dict[str, str], hit: Hit, time: SearchTime) -> Judged:
    signs = tuple(time.search(feature.pattern, parts[feature.part]) is not None for feature in lexicon.features)
    odds = lexicon.bias + sum(f.weight for f, there in zip(lexicon.features, signs, strict=True) if there)
    words: frozenset[str] = frozenset()
    if lexicon.words is not None:
        begin = len(parts["before"])
        words = word_signs(parts["line"], begin, begin + len(parts["phrase"]), lexicon.classes)
        odds += lexicon.words.odds(words)
    return Judged(1 / (1 + math.exp(-max(-_MOST_ODDS, min(_MOST_ODDS, odds)))), signs, words, hit)


def _parts(window: Window, found: Any) -> dict[str, str]:
    """Return what features look at: the phrase, its line, the line as printed, and what stands before, above, below and around.

    A null character stands in the phrase's place (``in_place``), or before it between the lines above and below (``amid``).
    """
    first = window.index(found.start())
    line, at = window.line_around(found.start())
    cut = max(0, at - LINE_CHARS)
    line, at = line[cut : at + LINE_CHARS], at - cut
    end = min(len(line), at + found.end() - found.start())
    above = window.above(first)[-ABOVE_CHARS:]
    below = "".join(window.texts[first + 1 : first + 1 + BELOW_LINES]).strip("\n")[:ABOVE_CHARS]
    raw = window.lines[first].text
    if is_title(raw, above, below):
        raw = raw[mark_chars(raw) :]
    amid = f"{line[:at]}\0{line[at:]}"
    return {
        "phrase": line[at:end],
        "line": line,
        "before": line[:at],
        "behind": " ".join(f"{line[end:]}\n{below[:LINE_CHARS]}".split()),
        "in_place": f"{line[:at]}\0{line[end:]}",
        "amid": "\n".join((above.rstrip("\n").rpartition("\n")[2], amid, below.partition("\n")[0])),
        "raw": raw[: 4 * LINE_CHARS],
        "above": above,
        "below": below,
        "around": f"{above[-LINE_CHARS:]}\n{line}\n{below}",
    }


def nearest_kind(lexicon: Lexicon, window: Window, hit: Hit, time: SearchTime, body: str = "") -> str:
    """Return the kind that the line names, else the lines around it; ``other`` where none does, or a search takes too long.

    ``body``: of the report whose title the line is.
    """
    line, at = window.line_around(hit.position)
    near = line[max(0, at - LINE_CHARS) : at + LINE_CHARS]
    around = "".join(window.texts[max(0, hit.first - BELOW_LINES) : hit.first + 1 + BELOW_LINES])
    with contextlib.suppress(TimeoutError):
        for text in (near, around, body):
            for kind, pattern in lexicon.kinds:
                if time.search(pattern, text) is not None:
                    return kind
    return "other"


def message_of(lexicon: Lexicon, window: Window, found: Any, time: SearchTime) -> Hit:
    """Return the message: its line, and the sizes that stand on it and on the lines beside it."""
    text, first = window.text, window.index(found.start())
    line, at = window.line_around(found.start())
    begin = found.start() - at
    end = min(begin + CLAUSE_CHARS, begin + len(line) + len("".join(window.texts[first + 1 : first + 1 + BELOW_LINES])))
    facts: dict[str, Fact] = {}
    for clause in lexicon.clauses:
        part = time.search(clause, text, pos=begin, endpos=end)
        if part is not None:
            facts = {**sized(part, text), **facts}
    message = " ".join(line[max(0, at - _MESSAGE_CHARS) : at + _MESSAGE_CHARS].split())
    return Hit(_SIGNATURE, _WORDING, first, first, found.end() - found.start(), message, facts, found.start())
