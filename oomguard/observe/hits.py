"""Match one wording on a window: where it stands, and the facts that it and its clauses carry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.errors import SettingError
from oomguard.facts import Fact
from oomguard.observe.search_time import SearchTime
from oomguard.observe.window import Window
from oomguard.rules.pattern import group_value
from oomguard.rules.signature import Quotation, Signature, Wording

# A message's clauses lie within so many characters of its wording: the longest allocator message has about 1000.
CLAUSE_CHARS: Final = 2500
# What introduces a quotation, or goes on from it, lies within so many characters of it.
ABOVE_CHARS: Final = 1500
# From the beginning of a word, so that a long word is tried once; scripts without spaces write a name behind the word before it.
_NAME_BEGUN: Final = re.compile(r"(?<![\w.])(?:[\w.]*(?:Error|Exception)(?:\([\"']?|:)\s*)?(?:\w+\.)*\Z", re.ASCII)
_EXCEPTION_LINE: Final = re.compile(
    r"^[ \t]*(?:Caused by: )?(?:\w+\.)*\w*(?:Error|Exception)(?:\(|:|$)", re.MULTILINE | re.ASCII
)
_EXCEPTION_NAME: Final = re.compile(r"(?:[\w.]*(?:Error|Exception)(?:\([\"']?|:)\s*)+")


@dataclass(frozen=True, slots=True)
class Hit:
    """One wording found: its first and last line in the window, its length, its text, its facts and where it begins."""

    signature: Signature
    wording: Wording
    first: int
    last: int
    span: int
    message: str
    facts: dict[str, Fact]
    position: int

    @property
    def kind(self) -> str | None:
        """The kind of failure, None for a line that tells no failure."""
        return self.wording.kind or self.signature.kind

    @property
    def framework(self) -> str:
        """The framework that printed it."""
        return self.wording.framework or self.signature.framework


def match(signature: Signature, wording: Wording, window: Window, time: SearchTime) -> Hit | None:
    """Match a wording where it touches the anchor's line; None if it does not.

    Raises TimeoutError if a search takes longer than it may: see ``SearchTime``.
    """
    text = window.text
    begin, end = window.anchor_span
    found = time.first_behind(wording.pattern, text, begin)
    if found is None or found.start() >= max(1, end):
        return None  # what does not touch the anchor's line belongs to another window
    facts = captured(found)
    start, stop = found.span()
    if signature.clauses:
        limit = min(start + CLAUSE_CHARS, _next_message(signature, wording, window, stop, time))
        for clause in signature.clauses:
            part = time.search(clause, text, pos=start, endpos=limit)
            if part is not None:
                told = captured(part).items()
                facts.update((name, fact) for name, fact in told if name not in facts or refines(fact, facts[name]))
                stop = max(stop, part.end())
    for name, value in wording.facts.items():
        facts[name] = Fact(name, value, "printed")
    message = " ".join(text[start:stop].split())
    return Hit(signature, wording, window.index(start), window.index(stop - 1), stop - start, message, facts, start)


def _next_message(signature: Signature, own: Wording, window: Window, position: int, time: SearchTime) -> int:
    """Return where the message that ends behind a position is over: clauses behind it belong to another one.

    That is where the next one of its signature begins, with its line, or an exception of any name, or a record of the log that tells
    no failure.
    """
    text = window.text
    headlines = [w.pattern for w in signature.wordings if "(?P<tried>" in w.pattern.pattern]
    later = [time.search(p, text, pos=position) for p in (headlines or [own.pattern])]
    lines = [(text.rfind("\n", 0, m.start()) + 1, m.start()) for m in later if m is not None]
    # On the line of the first message the next one begins with its own words.
    ends = [line if line > position else max(position, start) for line, start in lines]
    named = _EXCEPTION_LINE.search(text, position)
    record = window.next_record(position)
    return min((*ends, *([named.start()] if named else []), *([] if record is None else [record])), default=len(text))


def captured(found: Any) -> dict[str, Fact]:
    """Return the facts that the named groups of a match tell."""
    facts: dict[str, Fact] = {}
    for group, captured in found.capturesdict().items():
        if not captured or group.startswith("_"):
            continue
        try:
            parts = [group_value(group, part) for part in captured]
        except SettingError:
            continue
        fact = parts[0]
        if len(parts) > 1 and fact.name.endswith("_bytes"):  # "Process 1 has …. Process 2 has …."
            fact = replace(fact, value=sum(int(p.value) for p in parts), slack=sum(p.slack for p in parts))
        facts[fact.name] = fact
    return facts


def agree(one: Fact, other: Fact) -> bool:
    """Return whether two facts may be one figure, printed with more digits and with fewer."""
    if isinstance(one.value, (str, bool)) or isinstance(other.value, (str, bool)):
        return one.value == other.value
    return abs(one.value - other.value) <= one.slack + other.slack


def refines(one: Fact, known: Fact) -> bool:
    """Return whether a fact is a known figure with more digits."""
    return one.slack < known.slack and agree(one, known)


def best_of(hits: list[Hit]) -> Hit:
    """Return the wording with most figures: a bare headline is part of the whole message, a wrapper stands for what it wraps."""
    best = max(hits, key=lambda hit: (len(hit.facts), hit.span))
    outer = next((hit for hit in hits if best.kind in hit.signature.wraps), None)
    return (
        best if outer is None else replace(outer, facts={**outer.facts, **best.facts}, last=max(outer.last, best.last))
    )


def quoted(
    hit: Hit, window: Window, quotations: Iterable[Quotation], time: SearchTime, slow: Callable[[Quotation], None]
) -> str | None:
    """Return the name of the quotation that holds the message (source code, a prompt, advice), None for a real failure.

    ``slow`` is told of each quotation whose search takes longer than it may: see ``SearchTime``.
    """
    line, start = window.line_around(hit.position)
    above, raw = window.above(hit.first)[-ABOVE_CHARS:], window.lines[hit.first].text
    at = start
    # The wording may begin with the exception's name; what stands before the words behind it tells a quotation.
    name = _EXCEPTION_NAME.match(line, at)
    at = name.end() if name else at
    end = max(at, min(len(line), start + hit.span))
    below = "\n".join(behind.text for behind in window.lines[hit.last + 1 :])
    parts = {
        "page": f"{window.above(hit.first, raw=True)[-ABOVE_CHARS:]}\0{raw}\0\n{below[:ABOVE_CHARS]}",
        "line": line,
        "before": line[:at],
        "lead": _NAME_BEGUN.sub("", line[:start]),
        "around": f"{line[:at]}\0{line[end:]}",
        "raw": raw,
        "above": above,
        "below": "".join(window.texts[hit.last + 1 :])[:ABOVE_CHARS],
    }
    figures = sum(not isinstance(fact.value, str) for fact in hit.facts.values())
    for quotation in quotations:
        if figures >= quotation.below_facts:
            continue
        try:
            if time.search(quotation.pattern, parts[quotation.part]):
                return quotation.name
        except TimeoutError:
            slow(quotation)
    return None
