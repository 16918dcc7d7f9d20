"""Labels that lie beside one another in a picture: shortened to the room that there is, left out where that is none."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Final

from oomguard.report.picture import Anchor, Label

SIZE: Final = 11
# Widths in pixels at ``SIZE``, on the safe side: those of DejaVu Sans, with which matplotlib draws.
_WIDE, _CAPITAL, _LETTER = 11.5, 8.5, 7.0
_WIDE_LETTERS: Final = frozenset("mwMW@%&+=<>~#…")
_NARROW_LETTERS: Final = frozenset(" .,:;'|!iljtf()[]/I-")
_NARROW: Final = 4.5
_FEWEST: Final = 3  # shown of a text that is shortened, with its dots


def one_line(text: str) -> str:
    """Return a text without line breaks."""
    return " ".join(text.split())


def width(text: str) -> float:
    """Return the pixels that a text takes, or a little more."""
    return sum(map(_width, text))


def shortened(text: str, room: float) -> str:
    """Return a text, or its beginning, that takes no more than ``room`` pixels; empty where hardly a letter would be left."""
    if width(text) <= room:
        return text
    room -= _width("…")
    for number, letter in enumerate(text):
        room -= _width(letter)
        if room < 0:
            return f"{text[:number].rstrip()}…" if number + 1 >= _FEWEST else ""
    return text


def in_a_row(
    points: Iterable[tuple[float, str]], y: float, color: str, *, gap: float, ends: tuple[float, float]
) -> list[Label]:
    """Return a label at each point of a row, of which none reaches another one, another point, or beyond the row.

    Args:
        points: where each label belongs, and its text.
        y: the base line.
        color: the name of a colour.
        gap: pixels between a point and its label.
        ends: where the row begins and ends.
    """
    ordered = sorted(points)
    labels: list[Label] = []
    taken = ends[0]
    for i, (x, text) in enumerate(ordered):
        after = ordered[i + 1][0] if i + 1 < len(ordered) else ends[1]
        right, left = min(after, ends[1]) - x - 2 * gap, x - taken - 2 * gap
        is_left = width(text) > right and (left >= width(text) or not shortened(text, right))
        anchor: Anchor = "end" if is_left else "start"
        told = shortened(text, left if is_left else right)
        taken = x
        if told:
            labels.append(Label(x - gap if is_left else x + gap, y, told, color, anchor, SIZE))
            taken = x if is_left else x + gap + width(told)
    return labels


def _width(letter: str) -> float:
    if letter in _NARROW_LETTERS:
        return _NARROW
    if letter in _WIDE_LETTERS or unicodedata.east_asian_width(letter) in "WF":
        return _WIDE
    return _CAPITAL if letter.isupper() or not letter.isascii() else _LETTER
