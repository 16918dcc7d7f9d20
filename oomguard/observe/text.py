"""One raw line made comparable: terminal escapes and logger prefixes peeled, the process they name kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from oomguard.escapes import strip_escapes

_PROCESS: Final = re.compile(r"\s*\((?P<name>[A-Za-z][\w.:-]*(?: rank=\d+| [A-Z]+\d*)* pid=\d+)(?:, ip=[\d.]+)?\)\s?")
_RANK: Final = re.compile(r"\s*\[(?P<name>rank\d+)\]:\s?")
_LOGGER: Final = re.compile(
    r"\s*(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]{1,80}:\d+\]\s?"
)


@dataclass(frozen=True, slots=True)
class PlainLine:
    """The words of one line, without prefixes, and the process that its prefix named (None where it named none)."""

    text: str
    process: str | None


def peel(line: str) -> PlainLine:
    """Peel escapes, then process, rank and logger prefixes in any order, until none is left."""
    text, process = strip_escapes(line), None
    for _ in range(4):
        for pattern in (_PROCESS, _RANK, _LOGGER):
            match = pattern.match(text)
            if match:
                text = text[match.end() :]
                process = process or match.groupdict().get("name")
                break
        else:
            break
    return PlainLine(text, process)
