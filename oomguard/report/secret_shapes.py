"""Secrets by their own shape, whatever stands before them: tokens with a known prefix, URLs, headers, private keys."""

from __future__ import annotations

import functools
import re
from typing import Final

from oomguard.report.secret_data import parts, token_rests
from oomguard.report.secret_names import MASK

_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)", re.DOTALL
)
_BREAKS: Final = frozenset({"\\n", "\\r", "\\t"})  # as JSON within a line writes them
_PEM: Final = "-----BEGIN "


def hide_shapes(text: str) -> str:
    """Replace every secret that its shape tells by ``***``."""
    lowered = text.lower()
    for needed, pattern in parts():
        if needed in lowered:
            text = _compiled(pattern).sub(rf"\1{MASK}", text)
    text = _hide_tokens(text)
    return _PRIVATE_KEY.sub(MASK, text) if _PEM in text else text


def _hide_tokens(text: str) -> str:
    find, rests = _prefixes(), token_rests()
    pieces, kept, position = [], 0, 0
    while found := find.search(text, position):
        start = found.start()
        position = start + 1
        if _is_within_word(text, start):
            continue
        rest = _compiled(rests[found.group()]).match(text, found.end())
        if rest is not None:
            pieces += [text[kept:start], MASK]
            kept = position = rest.end()
    return "".join([*pieces, text[kept:]]) if pieces else text


def _is_within_word(text: str, start: int) -> bool:
    if start == 0 or not (text[start - 1].isalnum() or text[start - 1] == "_"):
        return False
    return text[max(0, start - 2) : start] not in _BREAKS


@functools.cache
def _prefixes() -> re.Pattern[str]:
    """Return all prefixes as one pattern, the longer of two first, branched by their first character."""
    by_first: dict[str, list[str]] = {}
    for prefix in sorted(token_rests(), key=len, reverse=True):
        by_first.setdefault(prefix[0], []).append(re.escape(prefix[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?:{'|'.join(ends)})" for first, ends in by_first.items()))


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
