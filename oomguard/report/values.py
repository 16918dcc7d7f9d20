"""Find where the value after a key ends, in text of any notation: Python, JSON, JSON inside JSON, shell, YAML."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_OPENER: Final = re.compile(r"[bBrRuUfF]{0,2}(\\*)([\"'])")
_QUOTES_AND_BRACKETS: Final = re.compile(r"(\\*)([\"'])|[\[\](){}]")
_BARE: Final = re.compile(r"[^\s\"',;\[\](){}<>|&\\]+(?:,(?=[^\s\"',=:]+(?:\s|\Z))[^\s\"',]+)*")
_MAX_LIST_CHARS: Final = 4096  # a longer one counts as going on to the end of the text
_LINE: Final = re.compile(r"[^\"'\\\n]+")


@dataclass(frozen=True, slots=True)
class ValueSpan:
    """Where a value stands: ``text[start:end]`` between its quotes or brackets; ``after`` is behind those.

    ``form`` is ``quoted``, ``list``, ``call`` or ``bare``.
    """

    start: int
    end: int
    after: int
    form: str


def value_at(text: str, position: int, *, whole_line: bool = False) -> ValueSpan | None:
    """Find the value that begins at a position.

    Args:
        text: the text; a value that is cut off ends with it.
        position: where the value begins.
        whole_line: a value without quotes is the rest of the line (a header), not one word.

    Returns:
        None if no value begins there.
    """
    if opener := _OPENER.match(text, position):
        start = opener.end()
        end = _quote_end(text, start, opener.group(2), len(opener.group(1)))
        after = min(len(text), end + len(opener.group(1)) + 1)
        while not opener.group(1) and after < len(text) and text[after] in "\"'":  # 'it'"'"'s' is one word of a shell
            end = _quote_end(text, after + 1, text[after], 0)
            after = min(len(text), end + 1)
        return ValueSpan(start, end, after, "quoted")
    if text[position : position + 1] in {"[", "(", "{"}:
        end = _bracket_end(text, position)
        return ValueSpan(position + 1, end, min(len(text), end + 1), "list")
    bare = (_LINE if whole_line else _BARE).match(text, position)
    if bare is None:
        return None
    end = bare.end()
    if text[end : end + 1] == "(" and text[bare.start() : end].isidentifier():  # SecretStr('...'), tensor([...])
        end = min(len(text), _bracket_end(text, end) + 1)
        return ValueSpan(position, end, end, "call")
    return ValueSpan(position, end, end, "bare")


def _quote_end(text: str, start: int, quote: str, escapes: int) -> int:
    """Return where a string closes that ``quote`` opened behind ``escapes`` backslashes: before those backslashes."""
    position = start
    while (found := text.find(quote, position)) >= 0:
        before = found
        while before > start and text[before - 1] == "\\":
            before -= 1
        count = found - before
        if (count % 2 == 0) if escapes == 0 else (count <= escapes):
            return found - (min(count, escapes) if escapes else 0)
        position = found + 1
    return len(text)


def _bracket_end(text: str, start: int) -> int:
    """Return where the bracket at ``start`` closes; brackets inside quotes do not count."""
    depth, position = 0, start
    limit = start + _MAX_LIST_CHARS
    while (found := _QUOTES_AND_BRACKETS.search(text, position)) and found.start() < limit:
        position = found.end()
        if found.group(2):
            # An apostrophe within a word opens nothing.
            if found.group(2) == '"' or found.start() == 0 or not text[found.start() - 1].isalnum():
                escapes = len(found.group(1))
                position = min(len(text), _quote_end(text, position, found.group(2), escapes) + escapes + 1)
        elif found.group() in "[({":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return found.start()
    return len(text)
