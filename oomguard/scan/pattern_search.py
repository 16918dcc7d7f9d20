"""Match one wording on a window: its position, and the facts of it and its clauses."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import Any, Final, NamedTuple

from oomguard.core.errors import SettingError
from oomguard.core.facts import Fact
from oomguard.rules.signature import Quotation, Signature, Wording, group_value
from oomguard.scan.context import ECHO_ANCHOR
from oomguard.scan.lines import PlainLine, excludes_failure
from oomguard.scan.source import Line

# Limit the processor time of one input's patterns, for each search and in total.
#
# It is the searching thread's processor time, so a busy machine gives the same result as an idle
# one.

SEARCH_TIMEOUT_S: Final = 0.5
# The free time of a search: a shipped pattern needs far less than a millisecond for a usual line.
FREE_S: Final = 0.02
# The shared time of all searches above the free part. Once it is used up, a search that exceeds the
# free part is skipped.
SHARED_S: Final = 5.0


class SearchTime:
    """Track the time of one input's searches."""

    def __init__(self) -> None:
        self._beyond_s = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a note if the shared time is used up and slow patterns were skipped."""
        if self._beyond_s < SHARED_S:
            return ()
        limit_ms = FREE_S * 1000
        return (
            (
                f"slow patterns took {SHARED_S:g} s in total; after that oomguard skipped "
                f"each search after {limit_ms:g} ms"
            ),
        )

    def search(self, pattern: Any, text: str, **span: int) -> Any:
        """Return the first match, or None.

        Args:
            pattern: a pattern of a signature; its compilation does not count.
            text: the text to search.
            span: ``pos`` and ``endpos``, as for ``Pattern.search``.

        Raises:
            TimeoutError: the search exceeds its limit.
        """
        compiled = getattr(pattern, "compiled", pattern)
        began = time.thread_time()
        try:
            return compiled.search(text, timeout=self._limit_s, **span)
        finally:
            self._count(began)

    def first_behind(self, pattern: Any, text: str, position: int) -> Any:
        """Return the first match that ends after a position, or None; raises like ``search``."""
        compiled = getattr(pattern, "compiled", pattern)
        began = time.thread_time()
        try:
            for m in compiled.finditer(text, timeout=self._limit_s):
                if m.end() > position:
                    return m
            return None
        finally:
            self._count(began)

    @property
    def _limit_s(self) -> float:
        return min(SEARCH_TIMEOUT_S, FREE_S + max(0.0, SHARED_S - self._beyond_s))

    def _count(self, began: float) -> None:
        self._beyond_s += max(0.0, time.thread_time() - began - FREE_S)


# Join the few lines around an anchor to one text for a pattern.

WINDOW_LINES = 16
CONTEXT_LINES = 4
# A window ends this many lines after its anchor, however many processes take turns.
MAX_AGE_LINES = 128
WINDOW_CHARS = 6000

Candidate = tuple[Signature, Wording]

# The allocator's sentences (c10/cuda/CUDACachingAllocator.cpp, torch 1.4 to 2.13), N for each
# number. If a tool wraps a message, only the first line has the process. A line that begins in the
# middle of these sentences continues the message.
_SENTENCES: Final = (
    " CUDA out of memory. Tried to allocate N GiB. GPU N has a total capacity of N GiB of which N "
    "GiB is free. Process N has N GiB"
    " memory in use. Including non-PyTorch memory, this process has N GiB memory in use. N GiB "
    "allowed; Of the allocated memory N GiB"
    " is allocated by PyTorch, with N GiB allocated in private pools (e.g., CUDA Graphs), and N "
    "GiB is reserved by PyTorch but"
    " unallocated. If reserved but unallocated memory is large try setting CONF to avoid "
    "fragmentation. See documentation for Memory"
    " Management (GPU N; N GiB total capacity; N GiB already allocated; N GiB free; N GiB reserved "
    "in total by PyTorch) "
    " is allocated by PyTorch, and N GiB is reserved N GiB is allocated by torch Allocated: N GiB "
    "; memory. Tried"
    " memory in use. Of the allocated ; memory in use. Process N ; is free. Including non-PyTorch "
    "; PyTorch memory, this process "
    # vllm/v1/core/kv_cache_utils.py and worker/utils.py, 0.9 to 0.33
    " To serve at least one request with the model's max seq len (N), (N GiB KV cache is needed, "
    "which is larger than the available KV"
    " cache memory (N GiB). Based on the available memory, the estimated maximum model length is N "
    "Try increasing Free memory on device"
    " cuda:N (N/N GiB) on startup is less than desired GPU memory utilization (N, N GiB). Decrease "
    "GPU memory utilization"
    " len (N), N GiB KV cache ; request with the models's max seq len "
    # sglang/srt/mem_cache/allocation.py and unified_radix_cache.py, 0.4 to 0.5.23
    " Try to allocate N ; Available tokens: N ; Avaliable tokens: N ; Available full tokens: N ; "
    "Available swa tokens: N ; Available swa: N"
    " ; Available mamba: N ; SWA available tokens: N "
)
# Placeholders for a number, a unit and the allocator's options.
_MARKS: Final = (
    (r"PYTORCH_\w*ALLOC_CONF=\S*", "CONF"),
    (r"\d[\d.]*", "N"),
    (r"\b(?:[KMG]iB|bytes)\b", "GiB"),
)
_BEGINS_WORDS: Final = 3
# A terminal or a form cuts a line at its width, inside a word or number; narrower ones do not
# occur.
_LEAST_COLUMNS: Final = 40
_WORDS: Final = frozenset(filter(str.isalpha, (word.strip("(),.;'") for word in _SENTENCES.split()))) | {
    "KiB", "MiB", "bytes", "OutOfMemoryError", "PyTorch", "non",
}  # fmt: skip
_UNITS: Final = ("KiB", "MiB", "GiB")
_BEFORE_FIGURES: Final = frozenset({"allocate", "of", "which", "has", "memory", "and", "with", ""})
_DIGITS: Final = "0123456789."


def _goes_on(text: str) -> bool:
    """Return whether a line without a process begins inside the allocator's sentences."""
    words = text[:120].removeprefix("...").split()[: 2 * _BEGINS_WORDS]
    begun = " ".join(words)
    for pattern, mark in _MARKS:
        begun = re.sub(pattern, mark, begun)
    begun = " ".join(begun.replace("NGiB", "N GiB").split()[:_BEGINS_WORDS])
    return bool(begun) and f" {begun} " in f"{_SENTENCES} "


def _is_cut(before: str, behind: str) -> bool:
    """Return whether a line ends inside a word or number that the next line continues."""
    if (
        len(before) < _LEAST_COLUMNS
        or not behind[:1].isascii()
        or not before.strip()
        or not behind.strip()
    ):
        return False
    # Cut after a word: only the space separates both lines.
    if before.endswith(" "):
        for part in (before.rsplit(maxsplit=1)[-1], behind.split(None, 1)[0].strip(",.;")):
            if not (part in _WORDS or part[:1].isdigit()):
                return False
        return True
    if behind[:1].isalpha():
        begun = before[len(before.rstrip(ascii_letters)) :]
        rest = behind[: len(behind) - len(behind.lstrip(ascii_letters))]
        return bool(begun) and begun + rest in _WORDS and not _WORDS.issuperset((begun, rest))
    return _goes_on_with_figure(before, behind)


def _goes_on_with_figure(before: str, behind: str) -> bool:
    """Return whether a line ends inside an allocator number whose rest and unit follow."""
    known = before.rstrip(_DIGITS)
    rest = behind.lstrip(_DIGITS)
    if known == before or rest == behind or not known.endswith((" ", "(")):
        return False
    word = known.rstrip(" (;,").rpartition(" ")[2]
    is_decimal = behind[0] == "." and behind[1:2].isdigit()
    return (word in _BEFORE_FIGURES or known[-2:-1] in {";", ","}) and (
        is_decimal or rest.lstrip(" ").startswith(_UNITS)
    )


def _joint(before: str, line: Line, text: str) -> str:
    """Return the separator of two lines: nothing if one line was cut in two."""
    if line.continued or _is_cut(before, text):
        return ""
    return "\n"


@dataclass(slots=True, eq=False, repr=False)
class Window:
    """Collect the lines of one process around an anchor's line."""

    candidates: list[Candidate]
    process: str | None
    anchor: int
    lines: list[Line]
    orders: list[int]
    texts: list[str]
    limit: int = WINDOW_LINES
    complete: bool = False
    # The lines before the anchor from any process, stripped and as printed. The introduction of a
    # quotation names no process.
    context: tuple[tuple[int, str, str], ...] = ()

    @property
    def text(self) -> str:
        """Return all lines, stripped and joined."""
        return "".join(self.texts)

    @property
    def anchor_span(self) -> tuple[int, int]:
        """Return the start and end of the anchor's line in the joined text."""
        start = sum(map(len, self.texts[: self.anchor]))
        return start, start + len(self.texts[self.anchor])

    def above(self, index: int, *, raw: bool = False) -> str:
        """Return the lines before one of this window's lines, from any process.

        ``raw`` returns them as printed.
        """
        texts = []
        for order, text, printed in self.context:
            if order >= self.orders[index]:
                continue
            if raw:
                texts.append(printed)
            else:
                texts.append(text)
        return "\n".join(texts)

    def index(self, position: int) -> int:
        """Return the index of the line at a position of the joined text."""
        end = 0
        for i, text in enumerate(self.texts):
            end += len(text)
            if position < end:
                return i
        return len(self.texts) - 1

    def next_record(self, position: int) -> int | None:
        """Return the start of the next log record without failure after a position, or None."""
        begin = 0
        for line, text in zip(self.lines, self.texts, strict=True):
            if begin >= position and not line.continued and excludes_failure(line.text):
                return begin
            begin += len(text)
        return None

    def line_around(self, position: int) -> tuple[str, int]:
        """Return the joined line at a position, and the position within it."""
        text = self.text
        start = text.rfind("\n", 0, position) + 1
        end = text.find("\n", position)
        return text[start : len(text) if end < 0 else end], position - start

    def extend(self, line: Line, plain: PlainLine, order: int) -> None:
        """Add the next line of the stream if it belongs here and the window is not complete.

        Args:
            line: the line as printed.
            plain: the same line without prefixes.
            order: its number in the stream.
        """
        if self.complete:
            return
        broken = False
        text = plain.text[:WINDOW_CHARS]
        # A document wraps a prefixed line onto lines without prefix: indented ones, and lines that
        # cannot begin a message.
        indented = len(text) - len(text.lstrip()) >= 2
        if plain.process == self.process or (
            plain.process is None and (indented or _goes_on(text))
        ):
            self.texts.append(_joint(self.texts[-1], line, text) + text)
            self.lines.append(line)
            self.orders.append(order)
        elif plain.process is None and plain.text.strip():
            # An unprefixed line after a prefixed one begins something else.
            broken = True
        own = self.texts[self.anchor + 1 :]
        self.complete = (
            broken
            or len(own) >= self.limit
            or sum(map(len, own)) >= WINDOW_CHARS
            or order - self.orders[self.anchor] >= MAX_AGE_LINES
        )


def open_window(lines: list[tuple[int, Line, PlainLine]], candidates: list[Candidate]) -> Window:
    """Open a window on the last of ``lines``, with earlier ones of the same process."""
    process = lines[-1][2].process
    text = lines[-1][2].text
    same = []
    for row in lines:
        if row[2].process == process:
            same.append(row)
    if process is None and _goes_on(text):
        # The message is wrapped after a process's prefix, so all wrapped lines belong to that
        # process.
        process = None
        for row in reversed(lines):
            if row[2].process:
                process = row[2].process
                break
        same = []
        for row in lines:
            if row[2].process == process or (row[2].process is None and _goes_on(row[2].text)):
                same.append(row)
    texts = [same[0][2].text]
    for (_, _, before), (_, line, behind) in itertools.pairwise(same):
        texts.append(_joint(before.text, line, behind.text) + behind.text)
    window = Window(
        candidates, process, len(same) - 1, [r[1] for r in same], [r[0] for r in same], texts
    )
    window.context = tuple((order, text.text, line.text) for order, line, text in lines)
    # A frame or a number needs its line or the next. Only a failure and a list of settings are
    # longer.
    window.limit = CONTEXT_LINES
    for signature, wording in candidates:
        if signature.kind is not None or wording.anchor == ECHO_ANCHOR:
            window.limit = WINDOW_LINES
    return window


# A message's clauses are within this many characters of its wording; the longest allocator message
# has about 1000.
CLAUSE_CHARS: Final = 2500
# The introduction or continuation of a quotation is within this many characters of it.
ABOVE_CHARS: Final = 1500
# From the start of a word, so that a long word is tried once. Scripts without spaces write a name
# directly after the word before it.
_NAME_BEGUN: Final = re.compile(
    r"(?<![\w.])(?:[\w.]*(?:Error|Exception)(?:\([\"']?|:)\s*)?(?:\w+\.)*\Z", re.ASCII
)
_EXCEPTION_LINE: Final = re.compile(
    r"^[ \t]*(?:Caused by: )?(?:\w+\.)*\w*(?:Error|Exception)(?:\(|:|$)", re.MULTILINE | re.ASCII
)
_EXCEPTION_NAME: Final = re.compile(r"(?:[\w.]*(?:Error|Exception)(?:\([\"']?|:)\s*)+")


class Hit(NamedTuple):
    """Hold one found wording: its lines in the window, its text, its facts and its position."""

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
        """Return the kind of failure, or None for a line without a failure."""
        return self.wording.kind or self.signature.kind

    @property
    def framework(self) -> str:
        """Return the framework that printed it."""
        return self.wording.framework or self.signature.framework


def match(signature: Signature, wording: Wording, window: Window, time: SearchTime) -> Hit | None:
    """Match a wording on the anchor's line; None if it does not match.

    Raises:
        TimeoutError: a search exceeds its limit (``SearchTime``).
    """
    text = window.text
    begin, end = window.anchor_span
    found = time.first_behind(wording.pattern, text, begin)
    if found is None or found.start() >= max(1, end):
        # A match outside the anchor's line belongs to another window.
        return None
    facts = captured(found)
    start, stop = found.span()
    if signature.clauses:
        limit = min(start + CLAUSE_CHARS, _next_message(signature, wording, window, stop, time))
        for clause in signature.clauses:
            part = time.search(clause, text, pos=start, endpos=limit)
            if part is not None:
                items = captured(part).items()
                for name, fact in items:
                    if name not in facts or refines(fact, facts[name]):
                        facts[name] = fact
                stop = max(stop, part.end())
    for name, value in wording.facts.items():
        facts[name] = Fact(name, value, "printed")
    message = " ".join(text[start:stop].split())
    return Hit(
        signature,
        wording,
        window.index(start),
        window.index(stop - 1),
        stop - start,
        message,
        facts,
        start,
    )


def _next_message(
    signature: Signature, own: Wording, window: Window, position: int, time: SearchTime
) -> int:
    """Return the end of the message that ends after a position; later clauses are another's.

    The end is the next match of its signature, with its line, an exception of any name, or a log
    record without failure.
    """
    text = window.text
    headlines = []
    for w in signature.wordings:
        if "(?P<tried>" in w.pattern.pattern:
            headlines.append(w.pattern)
    later = [time.search(p, text, pos=position) for p in (headlines or [own.pattern])]
    lines = []
    for m in later:
        if m is not None:
            lines.append((text.rfind("\n", 0, m.start()) + 1, m.start()))
    # On the line of the first message the next one begins with its own words.
    ends = [line if line > position else max(position, start) for line, start in lines]
    named = _EXCEPTION_LINE.search(text, position)
    record = window.next_record(position)
    return min(
        (*ends, *([named.start()] if named else []), *([] if record is None else [record])),
        default=len(text),
    )


def captured(found: Any) -> dict[str, Fact]:
    """Return the facts in the named groups of a match."""
    facts: dict[str, Fact] = {}
    for group, captured in found.capturesdict().items():
        if not captured or group.startswith("_"):
            continue
        try:
            parts = [group_value(group, part) for part in captured]
        except SettingError:
            continue
        fact = parts[0]
        # "Process 1 has …. Process 2 has …."
        if len(parts) > 1 and fact.name.endswith("_bytes"):
            fact = replace(
                fact, value=sum(int(p.value) for p in parts), slack=sum(p.slack for p in parts)
            )
        facts[fact.name] = fact
    return facts


def agree(one: Fact, other: Fact) -> bool:
    """Return whether two facts may be the same number with different precision."""
    if isinstance(one.value, (str, bool)) or isinstance(other.value, (str, bool)):
        return one.value == other.value
    return abs(one.value - other.value) <= one.slack + other.slack


def refines(one: Fact, known: Fact) -> bool:
    """Return whether a fact is a known number with more digits."""
    return one.slack < known.slack and agree(one, known)


def best_of(hits: list[Hit]) -> Hit:
    """Return the wording with the most numbers.

    A bare headline is part of the whole message, and a wrapper represents its cause.
    """
    best = max(hits, key=lambda hit: (len(hit.facts), hit.span))
    for outer in hits:
        if best.kind in outer.signature.wraps:
            facts = {**outer.facts, **best.facts}
            return outer._replace(facts=facts, last=max(outer.last, best.last))
    return best


def quoted(
    hit: Hit,
    window: Window,
    quotations: Iterable[Quotation],
    time: SearchTime,
    slow: Callable[[Quotation], None],
) -> str | None:
    """Return the name of the quotation around a message, or None for a real failure.

    A quotation is source code, a prompt or advice. ``slow`` receives each quotation whose search
    exceeds its limit (``SearchTime``).
    """
    line, start = window.line_around(hit.position)
    above = window.above(hit.first)[-ABOVE_CHARS:]
    raw = window.lines[hit.first].text
    at = start
    # The wording may begin with the exception's name. The text before the words after it shows a
    # quotation.
    name = _EXCEPTION_NAME.match(line, at)
    if name:
        at = name.end()
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
