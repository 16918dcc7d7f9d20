"""The words around a phrase as signs that the lexicon weighs: single words, pairs, and what kinds of words follow each other.

A wording that nobody has met shares words with those that were met, and the order of its words' kinds ("a verb of failing, memory, a
figure") with more of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import regex

# So far before and behind the phrase's first letter its line is read.
BEFORE_CHARS: Final = 200
BEHIND_CHARS: Final = 300
_BESIDE_CHARS: Final = 80
_BESIDE_WORDS: Final = 5
_CLASSES_IN_A_ROW: Final = 3
_WORD_CHARS: Final = 24
# Parts of names (OutOfMemoryError is four words), figures, letters of scripts that set no spaces, words of others, marks.
_WORD: Final = regex.compile(
    r"[A-Z]?[a-z]++|[A-Z]++(?![a-z])|[A-Z]|\d++(?:[.,]\d++)*+|[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_]++|[^\s\w]"
)
# What is told apart from other figures: a kill's status, errno 12, signal 9, Windows' 1455.
_KEPT_FIGURES: Final = frozenset({"137", "12", "9", "1455"})
_FIGURE: Final = "0"


def words_in(text: str) -> list[str]:
    """Return the words of a text in lower case, each figure as ``0``."""
    words = []
    for found in _WORD.finditer(text):
        word = found.group()
        is_figure = word[0].isdigit() and word not in _KEPT_FIGURES
        words.append(_FIGURE if is_figure else word[:_WORD_CHARS].lower())
    return words


def word_signs(line: str, begin: int, end: int, classes: Mapping[str, str]) -> frozenset[str]:
    """Return the signs of a line around the phrase that stands on it from ``begin`` to ``end``.

    Args:
        line: the line, and no more of a long one than what counts.
        begin: where the phrase begins.
        end: where it ends.
        classes: the kind of each word that has one.

    Returns:
        ``=`` and a word or two of the line, ``<`` and words before the phrase, ``>`` and words behind it, ``~`` and kinds of words.
    """
    around = words_in(line[max(0, begin - BEFORE_CHARS) : begin + BEHIND_CHARS])
    before = words_in(line[max(0, begin - _BESIDE_CHARS) : begin])[-_BESIDE_WORDS:]
    behind = words_in(line[end : end + _BESIDE_CHARS])[:_BESIDE_WORDS]
    kinds = [classes.get(word, _FIGURE) for word in around if word in classes or word == _FIGURE]
    signs = {*_rows("=", around, 2), *_rows("<", before, 2), *_rows(">", behind, 2)}
    signs.update(_rows("~", kinds, _CLASSES_IN_A_ROW))
    if not before:
        signs.add("<")
    if not any(char.isalnum() for char in line[end:]):
        signs.add(">")
    return frozenset(signs)


def _rows(mark: str, words: list[str], longest: int) -> Iterable[str]:
    """Yield every row of words up to a length, behind the mark of where they stand."""
    for length in range(1, longest + 1):
        for first in range(len(words) - length + 1):
            yield mark + " ".join(words[first : first + length])
