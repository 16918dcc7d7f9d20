"""The title of a thread: the first line of a text may be one, and its marks then quote nothing.

Who files an issue writes the message into its title: "[Bug]: ValueError: …", "# Bug: …". In the middle of a text the same marks are
an item of a list, a heading or a comment.
"""

from __future__ import annotations

import functools
import re
from typing import Final

# What trackers put before a report; a feature, a design and a page of the documentation tell no failure.
_MARKS: Final = (
    r"\s*(?:#{1,2}\s+)?(?:"
    r"(?:\[(?:[\w ]{1,20} )?(?i:bug|usage|performance|question|misc|installation|issue|crash|regression)[\w ]{0,12}\]"
    r"|(?:(?:Eval|Misc\.?|Possible) )?(?i:bug|issue|crash)(?= ?[:\uff1a]))\s*[:\uff1a]?\s*)+"
)
_HEADING: Final = r"\s*#\s+(?=\S)"
# What follows a title that tells of a run: a traceback, a level, a command, frames of other languages, the versions in use.
_OF_A_RUN: Final = (
    r'(?m)File "[^"\n]+", line \d|Traceback \(most|\b(?:ERROR|FATAL|CRITICAL)\b'
    r"|^\s*(?:[$>] )?(?:[A-Z_]+=\S+ )*(?:export|python3?|vllm|docker|torchrun|accelerate|sglang|ollama|lmdeploy)\s"
    r"|^\s{1,8}at [\w.<>$`/]+[.(]|^\s*#\d+\s+0x[0-9a-f]{6}|^thread '[^'\n]+' panicked"
    r"|^\W{0,3}[\w .-]{2,30}(?:==|[:\uff1a]) ?['\"`]?v?\d+\.\d+\.\d+"
    # the fields of a tracker's form
    r"|^(?:#{2,4} )?\W{0,3}(?i:system info|reproduction|(?:steps to |to )reproduce|expected behaviou?r|describe the bug|what happened"
    r"|bug description|your current environment|environment|current behaviou?r)\b\W{0,3}$"
)
_ANOTHER: Final = r"\s*(?:#{1,2} |#\d|[-*] |\[\w)"


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern, compiled on first use: few inputs begin with a title."""
    return re.compile(pattern)


def is_title(line: str, above: str, below: str) -> bool:
    """Return whether a line is the title of a report, and no item of a list or heading of a document.

    Args:
        line: the line as it was printed.
        above: what stands before it.
        below: the lines after it.
    """
    if above.strip():
        return False
    if _compiled(_MARKS).match(line):
        return not _compiled(_ANOTHER).match(below.lstrip("\n"))
    return _compiled(_HEADING).match(line) is not None and _compiled(_OF_A_RUN).search(below) is not None


def mark_chars(line: str) -> int:
    """Return how many characters at a title's beginning are marks."""
    marks = _compiled(_MARKS).match(line) or _compiled(_HEADING).match(line)
    return marks.end() if marks else 0
