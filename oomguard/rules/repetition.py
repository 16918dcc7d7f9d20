"""How long a pattern gets once its repetitions are written out: known before compiling it, which may never end.

The library compiles ``(?:abc){99999999}`` by copying its part, and no time limit holds there. The text is read by the
library's own grammar (version 0); flags that would change that grammar are refused.
"""

from __future__ import annotations

import re
from typing import Final

# Far beyond any need: a window of a log has some 6000 characters.
MAX_REPEATED_CHARS: Final = 20_000

# Compiled when the first pattern is: where all of them lie compiled in the cache, none is read.
_GRAMMAR: Final = r"""
      (?P<escape>\\.)
    | (?P<set>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*+\])
    | (?P<comment>\(\?\#[^)]*\))
    | (?P<flags>\(\?[A-Za-z0-9]*+(?:-[A-Za-z]*+)?[:)])
    | (?P<open>\()
    | (?P<close>\))
    | (?P<repeat>\{(?=[^}]*[0-9])[0-9\s]*(?:,[0-9\s]*)?\})
    | .
    """


def too_much_repetition(text: str) -> tuple[int, str] | None:
    """Return position and reason of what makes a pattern too long or unreadable here; None if it may be compiled."""
    totals, last = [0], 0  # the length so far of each open group; the length of the part just read
    for token in re.finditer(_GRAMMAR, text, re.VERBOSE | re.DOTALL):
        if token.lastgroup == "flags" and re.search(r"x|V1", token.group()):
            return token.start(), "the flags x and V1 are not known here"
        opens = token.lastgroup == "open" or (token.lastgroup == "flags" and token.group().endswith(":"))
        if opens:
            totals.append(0)
        elif token.lastgroup == "close" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif token.lastgroup == "repeat":
            longer = last * _most(token.group())
            totals[-1] += longer - last
            last = longer
            if sum(totals) > MAX_REPEATED_CHARS:
                return token.start(), f"longer than {MAX_REPEATED_CHARS} characters with its repetitions written out"
        elif token.lastgroup not in {"comment", "flags"}:
            last = 1
            totals[-1] += last
    return None


def _most(quantifier: str) -> int:
    """Return how often ``{3}``, ``{3,5}`` or ``{3,}`` repeats its part: at most, or at least if it has no upper end."""
    counts = [part for part in re.sub(r"\s", "", quantifier.strip("{}")).split(",") if part]
    return max(1, *(int(count) if len(count) < 10 else 10**9 for count in counts))
