"""Which of many literals a line holds, by three characters from their middle.

A short input is not worth a search automaton (anchors.py), and asking a line for each of some hundred literals takes longer than all
the rest. A line has one set of threes; a literal is looked for only where its own is among them.
"""

from __future__ import annotations

import functools
from typing import Final

_THREE: Final = 3


class AnchorIndex:
    """Literals by the three in their middle; those that are shorter are looked for in every line."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        self._by_three: dict[str, list[str]] = {}
        self._short: list[str] = []
        for literal in dict.fromkeys(literals):
            middle = max(0, len(literal) // 2 - 1)
            if len(literal) < _THREE:
                self._short.append(literal)
            else:
                self._by_three.setdefault(literal[middle : middle + _THREE], []).append(literal)

    def inside(self, text: str) -> list[str]:
        """Return the literals that a text holds, in no particular order."""
        found = [literal for literal in self._short if literal in text]
        for three in self._by_three.keys() & set(_threes(text)):
            found += [literal for literal in self._by_three[three] if literal in text]
        return found


def _threes(text: str) -> list[str]:
    return [text[at : at + _THREE] for at in range(len(text) - _THREE + 1)]


@functools.lru_cache(maxsize=8)
def anchor_index(literals: tuple[str, ...]) -> AnchorIndex:
    """Return the index of these literals, made once."""
    return AnchorIndex(literals)
