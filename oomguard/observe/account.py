"""A report that tells the failure in a sentence: the message was never pasted, or it was cut off.

Who asks for help writes "with a longer prompt I get OOM" and pastes a command, a form, or the beginning of a log. Such a sentence counts
where somebody reports or asks, where it tells what happened and neither supposes, denies nor advises, and where the text below it prints
no other error. A change to code, a guide and a request speak of memory in the same words: they tell no failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from oomguard.observe.search_time import SearchTime
from oomguard.observe.title import mark_chars
from oomguard.rules.account import AccountWords

# Who reports a failure tells it at the beginning or below a short log.
HEAD_LINES: Final = 120
_HEAD_CHARS: Final = 12_000
_SENTENCE_CHARS: Final = 600
_SENTENCE_END: Final = re.compile(r"[.!?;]['\"`)]*\s+|[\u3002\uff01\uff1f\uff1b]|\s{3,}|\n")
_FENCE: Final = re.compile(r"\s*(?:`{3}|~{3})")


class Account:
    """The lines that an input begins with, and what of them a person wrote."""

    def __init__(self, words: AccountWords | None, other_error: Any) -> None:
        self._words = words
        self._other_error = other_error
        self._lines: list[str] = []
        self._prose: dict[int, str] = {}  # by number: lines outside of fences
        self._chars = 0
        self._fenced = False
        self._is_report: dict[bool, bool] = {}

    def see(self, text: str, number: int) -> None:
        """Take the next line of the input; only the first ones are kept."""
        if self._words is None or len(self._lines) >= HEAD_LINES or self._chars >= _HEAD_CHARS:
            return
        if not self._lines and not text.strip():
            return
        self._is_report.clear()
        self._lines.append(text[:_HEAD_CHARS])
        self._chars += len(text)
        if _FENCE.match(text):
            self._fenced = not self._fenced
        elif not self._fenced:
            self._prose[number] = text

    @property
    def _head(self) -> str:
        return "\n".join(self._lines)[:_HEAD_CHARS]

    def is_report(self, time: SearchTime, *, below_title: bool = False) -> bool:
        """Return whether somebody reports or asks, and the text is no document and prints no other error.

        ``below_title``: what the first line says is not asked.
        """
        if below_title not in self._is_report:
            self._is_report[below_title] = self._tells_report(time, below_title=below_title)
        return self._is_report[below_title]

    def _tells_report(self, time: SearchTime, *, below_title: bool) -> bool:
        words = self._words
        if words is None:
            return False
        said = "\n".join(list(self._prose.values())[1 if below_title else 0 :])[:_HEAD_CHARS]
        try:
            is_form = time.search(words.form, said) is not None
            if self.is_document(time) or (not is_form and time.search(words.note, self._head)):
                return False
            is_told = is_form or time.search(words.report, said) is not None
            return is_told and (self._other_error is None or time.search(self._other_error, self._head) is None)
        except TimeoutError:
            return False

    def is_document(self, time: SearchTime) -> bool:
        """Return whether the text is a change to code, a page or a request."""
        try:
            return self._words is not None and time.search(self._words.document, self._head) is not None
        except TimeoutError:
            return False

    def is_of_a_document(self, number: int, time: SearchTime) -> bool:
        """Return whether a line is a sentence of a change to code, of a page or of a request."""
        raw = self._prose.get(number)
        if self._words is None or raw is None:
            return False
        try:
            is_said = number == min(self._prose) or time.search(self._words.line, raw) is None
            return is_said and self.is_document(time)
        except TimeoutError:
            return False

    def told_on(self, text: str, span: tuple[int, int], number: int, time: SearchTime) -> Iterator[Any]:
        """Yield what a sentence of a line calls the failure that it tells.

        Args:
            text: lines as one text, peeled.
            span: where the line stands in it.
            number: the line's number in the input.
            time: what searches may take.
        """
        words, raw = self._words, self._prose.get(number)
        if words is None or raw is None:
            return
        is_first = number == min(self._prose)
        try:
            if time.search(words.line, raw[mark_chars(raw) :] if is_first else raw) is not None:
                return
            begin, end = span
            while (found := time.search(words.phrase, text, pos=begin, endpos=end)) is not None:
                if _is_told(words, _sentence(text, span, found), time):
                    yield found
                begin = max(found.end(), begin + 1)
        except TimeoutError:
            return


def _is_told(words: AccountWords, sentence: str, time: SearchTime) -> bool:
    if any(time.search(pattern, sentence) is not None for pattern in words.denies):
        return False
    return any(time.search(pattern, sentence) is not None for pattern in words.tells)


def _sentence(text: str, span: tuple[int, int], found: Any) -> str:
    """Return the sentence of a line around what was found, a null character in its place."""
    line, at, end = text[span[0] : span[1]].rstrip("\n"), found.start() - span[0], found.end() - span[0]
    begin = max((one.end() for one in _SENTENCE_END.finditer(line, 0, at)), default=0)
    stop = _SENTENCE_END.search(line, end)
    before = line[max(begin, at - _SENTENCE_CHARS) : at].lstrip("\n")
    return f"{before}\0{line[end : len(line) if stop is None else stop.end()][:_SENTENCE_CHARS]}"
