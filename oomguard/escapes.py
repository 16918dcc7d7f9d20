"""Terminal escapes and control characters: what a log may hold and a terminal must not get."""

from __future__ import annotations

import re
from typing import Final

# CSI, OSC (ended, or alone where it never ends: the text after it is kept) and two-byte escapes (ECMA-48), then every
# other control character but tab, and the marks that turn the direction of text.
_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\]|\x1b[@-_]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def strip_escapes(line: str) -> str:
    """Return the line without terminal escapes and control characters: safe to print, safe to match."""
    return _ESCAPES.sub("", line)
