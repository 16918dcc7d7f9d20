"""Which of many literals a line holds, by three of their characters.

A short input is not worth a search automaton (anchors.py), and asking a line for each of some hundred literals takes longer than all
the rest. A line has one set of threes; a literal is looked for only where its own is among them. Its own is the first that begins
with a character which few lines hold, else the one in its middle.
"""

from __future__ import annotations

import functools
import re
from typing import Final

_THREE: Final = 3
_RARE: Final = re.compile(r"[A-Zjqxz_/(\[\]=:\\*]..|[kvwyfb][^aeiou ].")


class AnchorIndex:
    """Literals by three characters of each; those that are shorter are looked for in every line."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        self._by_three: dict[str, list[str]] = {}
        self._short: list[str] = []
        for literal in dict.fromkeys(literals):
            if len(literal) < _THREE:
                self._short.append(literal)
            else:
                self._by_three.setdefault(_own_three(literal), []).append(literal)

    def inside(self, text: str) -> list[str]:
        """Return the literals that a text holds, in no particular order."""
        found = [literal for literal in self._short if literal in text]
        by_three = self._by_three
        for three in {text[at : at + _THREE] for at in range(len(text) - _THREE + 1)}:
            if three in by_three:
                found += [literal for literal in by_three[three] if literal in text]
        return found


def _own_three(literal: str) -> str:
    rare = _RARE.search(literal, 1)
    middle = max(0, len(literal) // 2 - 1)
    return rare.group() if rare else literal[middle : middle + _THREE]


@functools.lru_cache(maxsize=8)
def anchor_index(literals: tuple[str, ...]) -> AnchorIndex:
    """Return the index of these literals, made once."""
    return AnchorIndex(literals)
