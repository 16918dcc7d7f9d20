"""Match one wording on a window: where it stands, and the facts that it and its clauses carry."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import Fact
from oomguard.rules.pattern import group_value
from oomguard.rules.signature import Quotation, Signature, Wording
from oomguard.scan.effective_settings import ECHO_ANCHOR
from oomguard.scan.log_prefixes import PlainLine, tells_no_failure
from oomguard.scan.source import Line

# The processor time that the patterns of one input may take: a limit for each search, and one for
# all of them together.
#
# Counted is the searching thread's processor time, so that a loaded machine leaves out nothing that
# an idle one finds.

SEARCH_TIMEOUT_S: Final = 0.5
# What a search may take without counting: a shipped pattern takes well below a millisecond on a
# line of usual length.
FREE_S: Final = 0.02
# Beyond that all searches of one input share so much; then each has no more than the free part, and
# is left out above it.
SHARED_S: Final = 5.0


class SearchTime:
    """What the searches of one input have taken so far."""

    def __init__(self) -> None:
        self._beyond_s = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell where the shared time is gone, so that a slow pattern is left out at its
        first search.
        """
        if self._beyond_s < SHARED_S:
            return ()
        limit_ms = FREE_S * 1000
        return (
            (
                f"slow patterns took {SHARED_S:g} s together: from then on each was left out after "
                f"{limit_ms:g} ms"
            ),
        )

    def search(self, pattern: Any, text: str, **span: int) -> Any:
        """Return the first match, or None.

        Args:
            pattern: a pattern of a signature; one that is compiled on first use is compiled before
                its time counts.
            text: what is searched.
            span: ``pos`` and ``endpos``, as of ``Pattern.search``.

        Raises:
            TimeoutError: the search takes longer than it may.
        """
        compiled = getattr(pattern, "compiled", pattern)
        began = time.thread_time()
        try:
            return compiled.search(text, timeout=self._limit_s, **span)
        finally:
            self._count(began)

    def first_behind(self, pattern: Any, text: str, position: int) -> Any:
        """Return the first match that ends behind a position, or None; raise as ``search`` does."""
        compiled = getattr(pattern, "compiled", pattern)
        began = time.thread_time()
        try:
            return next(
                (m for m in compiled.finditer(text, timeout=self._limit_s) if m.end() > position),
                None,
            )
        finally:
            self._count(began)

    @property
    def _limit_s(self) -> float:
        return min(SEARCH_TIMEOUT_S, FREE_S + max(0.0, SHARED_S - self._beyond_s))

    def _count(self, began: float) -> None:
        self._beyond_s += max(0.0, time.thread_time() - began - FREE_S)


# Join the few lines around an anchor into one text that a pattern can be matched on.

WINDOW_LINES = 16
CONTEXT_LINES = 4
# A window ends so many lines of the stream behind its anchor, however many processes print in turn.
MAX_AGE_LINES = 128
WINDOW_CHARS = 6000

Candidate = tuple[Signature, Wording]

# The allocator's sentences (c10/cuda/CUDACachingAllocator.cpp, torch 1.4 to 2.13), N for each
# figure: a tool that wraps, and a message of several lines, have the process before the first line
# alone; a line that begins with words from amid them goes on with the message.
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
# What stands for a figure, a unit and the allocator's options there.
_MARKS: Final = (
    (r"PYTORCH_\w*ALLOC_CONF=\S*", "CONF"),
    (r"\d[\d.]*", "N"),
    (r"\b(?:[KMG]iB|bytes)\b", "GiB"),
)
_BEGINS_WORDS: Final = 3
# A terminal or a form cuts a line at its width, amid a word or a figure; narrower ones are not
# used.
_LEAST_COLUMNS: Final = 40
_WORDS: Final = frozenset(filter(str.isalpha, (word.strip("(),.;'") for word in _SENTENCES.split()))) | {
    "KiB", "MiB", "bytes", "OutOfMemoryError", "PyTorch", "non",
}  # fmt: skip
_UNITS: Final = ("KiB", "MiB", "GiB")
_BEFORE_FIGURES: Final = frozenset({"allocate", "of", "which", "has", "memory", "and", "with", ""})
_DIGITS: Final = "0123456789."


def _goes_on(text: str) -> bool:
    """Return whether a line without a process begins amid the allocator's sentences."""
    words = text[:120].removeprefix("...").split()[: 2 * _BEGINS_WORDS]
    begun = " ".join(words)
    for pattern, mark in _MARKS:
        begun = re.sub(pattern, mark, begun)
    begun = " ".join(begun.replace("NGiB", "N GiB").split()[:_BEGINS_WORDS])
    return bool(begun) and f" {begun} " in f"{_SENTENCES} "


def _is_cut(before: str, behind: str) -> bool:
    """Return whether a line ends amid a word or a figure of the allocator's sentences, and the next
    goes on with it.
    """
    if (
        len(before) < _LEAST_COLUMNS
        or not behind[:1].isascii()
        or not before.strip()
        or not behind.strip()
    ):
        return False
    if before.endswith(" "):  # cut behind a word: the space is all that stands between the two
        return all(
            part in _WORDS or part[:1].isdigit()
            for part in (before.rsplit(maxsplit=1)[-1], behind.split(None, 1)[0].strip(",.;"))
        )
    if behind[:1].isalpha():
        begun = before[len(before.rstrip(ascii_letters)) :]
        rest = behind[: len(behind) - len(behind.lstrip(ascii_letters))]
        return bool(begun) and begun + rest in _WORDS and not _WORDS.issuperset((begun, rest))
    return _goes_on_with_figure(before, behind)


def _goes_on_with_figure(before: str, behind: str) -> bool:
    """Return whether a line ends amid a figure of the allocator's, and the next has the rest of it
    with its unit.
    """
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
    """Return what stands between two lines: nothing where one line was cut in two."""
    if line.continued or _is_cut(before, text):
        return ""
    return "\n"


@dataclass(slots=True)
class Window:
    """The lines of one process around the line that holds an anchor, while they are collected."""

    candidates: list[Candidate]
    process: str | None
    anchor: int
    lines: list[Line]
    orders: list[int]
    texts: list[str]
    limit: int = WINDOW_LINES
    complete: bool = False
    # The lines before the anchor, whoever wrote them, peeled and as printed: the introduction of a
    # quotation names no process.
    context: tuple[tuple[int, str, str], ...] = ()

    @property
    def text(self) -> str:
        """All lines, peeled and joined."""
        return "".join(self.texts)

    @property
    def anchor_span(self) -> tuple[int, int]:
        """Where the anchor's line begins and ends in the joined text."""
        start = sum(map(len, self.texts[: self.anchor]))
        return start, start + len(self.texts[self.anchor])

    def above(self, index: int, *, raw: bool = False) -> str:
        """Return the lines before one of this window's, whichever process wrote them; ``raw``: as
        they were printed.
        """
        return "\n".join(
            printed if raw else text
            for order, text, printed in self.context
            if order < self.orders[index]
        )

    def index(self, position: int) -> int:
        """Return the index of the line that holds a position of the joined text."""
        end = 0
        for i, text in enumerate(self.texts):
            end += len(text)
            if position < end:
                return i
        return len(self.texts) - 1

    def next_record(self, position: int) -> int | None:
        """Return where the first record of a log begins behind a position that tells no failure,
        None where there is none.
        """
        begin = 0
        for line, text in zip(self.lines, self.texts, strict=True):
            if begin >= position and not line.continued and tells_no_failure(line.text):
                return begin
            begin += len(text)
        return None

    def line_around(self, position: int) -> tuple[str, int]:
        """Return the joined line that holds a position, and the position within it."""
        text = self.text
        start = text.rfind("\n", 0, position) + 1
        end = text.find("\n", position)
        return text[start : len(text) if end < 0 else end], position - start

    def extend(self, line: Line, plain: PlainLine, order: int) -> None:
        """Take the next line of the stream if it belongs here and the window is not complete.

        Args:
            line: the line as it was printed.
            plain: the same line, peeled.
            order: its number within the stream.
        """
        if self.complete:
            return
        broken = False
        text = plain.text[:WINDOW_CHARS]
        # A document wraps a prefixed line onto lines without a prefix: indented ones, and those
        # that cannot begin a message.
        indented = len(text) - len(text.lstrip()) >= 2
        if plain.process == self.process or (
            plain.process is None and (indented or _goes_on(text))
        ):
            self.texts.append(_joint(self.texts[-1], line, text) + text)
            self.lines.append(line)
            self.orders.append(order)
        elif plain.process is None and plain.text.strip():
            broken = True  # an unprefixed line after a prefixed one starts something else
        own = self.texts[self.anchor + 1 :]
        self.complete = (
            broken
            or len(own) >= self.limit
            or sum(map(len, own)) >= WINDOW_CHARS
            or order - self.orders[self.anchor] >= MAX_AGE_LINES
        )


def open_window(lines: list[tuple[int, Line, PlainLine]], candidates: list[Candidate]) -> Window:
    """Open a window on the last of ``lines``; earlier ones belong to it if the same process wrote
    them.
    """
    process = lines[-1][2].process
    text = lines[-1][2].text
    same = [row for row in lines if row[2].process == process]
    if process is None and _goes_on(text):
        # Wrapped behind a process: the message is that process's, with all that was wrapped so far.
        process = next((row[2].process for row in reversed(lines) if row[2].process), None)
        same = [
            row
            for row in lines
            if row[2].process == process or (row[2].process is None and _goes_on(row[2].text))
        ]
    texts = [same[0][2].text]
    for (_, _, before), (_, line, behind) in itertools.pairwise(same):
        texts.append(_joint(before.text, line, behind.text) + behind.text)
    window = Window(
        candidates, process, len(same) - 1, [r[1] for r in same], [r[0] for r in same], texts
    )
    window.context = tuple((order, text.text, line.text) for order, line, text in lines)
    # A frame or a figure takes its line or the next; only a failure and a list of settings go on
    # for long.
    if all(
        signature.kind is None and wording.anchor != ECHO_ANCHOR
        for signature, wording in candidates
    ):
        window.limit = CONTEXT_LINES
    return window


# A message's clauses lie within so many characters of its wording: the longest allocator message
# has about 1000.
CLAUSE_CHARS: Final = 2500
# What introduces a quotation, or goes on from it, lies within so many characters of it.
ABOVE_CHARS: Final = 1500
# From the beginning of a word, so that a long word is tried once; scripts without spaces write a
# name behind the word before it.
_NAME_BEGUN: Final = re.compile(
    r"(?<![\w.])(?:[\w.]*(?:Error|Exception)(?:\([\"']?|:)\s*)?(?:\w+\.)*\Z", re.ASCII
)
_EXCEPTION_LINE: Final = re.compile(
    r"^[ \t]*(?:Caused by: )?(?:\w+\.)*\w*(?:Error|Exception)(?:\(|:|$)", re.MULTILINE | re.ASCII
)
_EXCEPTION_NAME: Final = re.compile(r"(?:[\w.]*(?:Error|Exception)(?:\([\"']?|:)\s*)+")


@dataclass(frozen=True, slots=True)
class Hit:
    """One wording found: its first and last line in the window, its length, its text, its facts and
    where it begins.
    """

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
                facts.update(
                    (name, fact)
                    for name, fact in told
                    if name not in facts or refines(fact, facts[name])
                )
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
    """Return where the message that ends behind a position is over: clauses behind it belong to
    another one.

    That is where the next one of its signature begins, with its line, or an exception of any name,
    or a record of the log that tells no failure.
    """
    text = window.text
    headlines = [w.pattern for w in signature.wordings if "(?P<tried>" in w.pattern.pattern]
    later = [time.search(p, text, pos=position) for p in (headlines or [own.pattern])]
    lines = [(text.rfind("\n", 0, m.start()) + 1, m.start()) for m in later if m is not None]
    # On the line of the first message the next one begins with its own words.
    ends = [line if line > position else max(position, start) for line, start in lines]
    named = _EXCEPTION_LINE.search(text, position)
    record = window.next_record(position)
    return min(
        (*ends, *([named.start()] if named else []), *([] if record is None else [record])),
        default=len(text),
    )


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
            fact = replace(
                fact, value=sum(int(p.value) for p in parts), slack=sum(p.slack for p in parts)
            )
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
    """Return the wording with most figures: a bare headline is part of the whole message, a wrapper
    stands for what it wraps.
    """
    best = max(hits, key=lambda hit: (len(hit.facts), hit.span))
    outer = next((hit for hit in hits if best.kind in hit.signature.wraps), None)
    if outer is None:
        return best
    return replace(outer, facts={**outer.facts, **best.facts}, last=max(outer.last, best.last))


def quoted(
    hit: Hit,
    window: Window,
    quotations: Iterable[Quotation],
    time: SearchTime,
    slow: Callable[[Quotation], None],
) -> str | None:
    """Return the name of the quotation that holds the message (source code, a prompt, advice), None
    for a real failure.

    ``slow`` is told of each quotation whose search takes longer than it may: see ``SearchTime``.
    """
    line, start = window.line_around(hit.position)
    above = window.above(hit.first)[-ABOVE_CHARS:]
    raw = window.lines[hit.first].text
    at = start
    # The wording may begin with the exception's name; what stands before the words behind it tells
    # a quotation.
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
