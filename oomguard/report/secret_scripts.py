"""Secrets in a program that stands in one word of a command: ``sh -c 'export API_KEY=SECRET; sh job.sh'``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from oomguard.report.secret_data import interpreters
from oomguard.report.secret_names import MASK, NUMBER, PROMPT, secrecy, tells

# NAME=, --flag= and the flag whose value the next word is.
_KEY: Final = re.compile(r"(?<![\w-])(-{0,2}\w[\w-]*)(\+?=|[ \t]+(?=[^\s-]))")
_RUNS_WORD: Final = re.compile(r"-[A-Za-z]*c\Z")
_ENDS: Final = frozenset(" \t\n\r;&|<>)")
_CLOSING: Final = {"(": ")", "{": "}"}
# What masking hides of a word and nothing else: one word of a shell, with the scheme of a header before it.
_ONE_WORD: Final = re.compile(r"(?:(?:Bearer|Basic|Token) +)?[^\s;&|]*\Z", re.IGNORECASE)


def is_script(words: Sequence[str], index: int) -> bool:
    """Return whether a word is a program, not a value: behind the ``-c`` of a shell or of Python."""
    if index == 0 or not _RUNS_WORD.match(words[index - 1]):
        return False
    names = (word.rpartition("/")[2].rstrip("0123456789.") for word in words[: index - 1])
    return any(name in interpreters() for name in names)


def hide_in_script(text: str) -> str:
    """Hide each value of a secret's or a prompt's name to the end of the shell's word, and nothing behind it."""
    pieces, kept, position = [], 0, 0
    quotes: list[str] = []
    while found := _KEY.search(text, position):
        name, glue = found.groups()
        position, begin = found.end(1), found.end()
        if not (secrecy(name) or (name.startswith("-") and PROMPT.match(name))):
            continue
        if not glue.endswith("=") and not name.startswith("-"):
            continue
        quotes = quotes or _open_quotes(text)
        end = _word_end(text, begin, quotes[begin])
        value = text[begin:end].strip("\"'\\")
        if not value or value == MASK or not tells(name, value) or (not secrecy(name) and NUMBER.match(value)):
            continue
        pieces += [text[kept:begin], MASK]
        kept = position = end
    return "".join([*pieces, text[kept:]])


def hides_secrets_alone(words: Sequence[str], masked: Sequence[str]) -> bool:
    """Return whether all that masking hid of a command is whole words of it, or single words of a shell within one.

    What else it hid may be a command: two that differ in it look the same.
    """
    return len(words) == len(masked) and all(map(_hides_one_word_each, words, masked))


def _hides_one_word_each(word: str, masked: str) -> bool:
    if masked in {word, MASK}:
        return True
    kept = masked.split(MASK)
    if not word.startswith(kept[0]):
        return False
    position = len(kept[0])
    for i, part in enumerate(kept[1:], 1):
        at = (len(word) - len(part) if i == len(kept) - 1 else word.find(part, position)) if part else len(word)
        if at < position or not word.startswith(part, at):
            return False
        hidden = word[position:at]
        quote = word[position - 1 : position]
        is_quoted = quote in {'"', "'"} and quote not in hidden and word.startswith(quote, at)
        if not is_quoted and not _is_one_word(hidden):
            return False
        position = at + len(part)
    return True


def _is_one_word(hidden: str) -> bool:
    return _word_end(hidden, 0, "") == len(hidden) or _ONE_WORD.match(hidden) is not None


def _open_quotes(text: str) -> list[str]:
    """Return for each position the quote that is open there, empty: none."""
    quote, is_escaped, found = "", False, [""]
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        found.append(quote)
    return found


def _word_end(text: str, begin: int, around: str) -> int:
    """Return where a shell's word ends that begins there within the quote ``around``; one that is cut off ends with the text."""
    quote, closing = "", list[str]()
    i = begin
    while i < len(text):
        char = text[i]
        if char == "\\" and quote != "'" and around != "'":
            i += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char == around:
            return i
        elif char in "\"'`":
            quote = char
        elif char in _CLOSING and (char == "(" or text[i - 1 : i] == "$"):
            closing.append(_CLOSING[char])
        elif closing:
            if char == closing[-1]:
                closing.pop()
        elif char in _ENDS:
            return i
        i += 1
    return len(text)
