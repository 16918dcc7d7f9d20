"""What a program in Python said last: the exception that ended it, followed back to what it says it comes from.

An exception that was handled may be printed too, and one raised while another is handled shows both. Only the last
traceback ended the program, with those that it names as its direct cause.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.escapes import strip_escapes
from oomguard.observe.engine_errors import passes_on
from oomguard.observe.text import TRACEBACK, peel
from oomguard.user_files import read_tables

TAIL_BYTES: Final = 1 << 18
_HEAD: Final = f"{TRACEBACK}:"
_CAUSE: Final = "The above exception was the direct cause of the following exception:"
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:\([\w.]+\))?(?::|\s*$)")
# Behind its traceback a program prints little: what the interpreter and loggers say while it ends.
_MOST_BEHIND: Final = 40


@dataclass(frozen=True, slots=True)
class LastWords:
    """The last traceback: its exception's line, and the lines of it and of its direct causes."""

    exception: str
    lines: tuple[str, ...]

    @property
    def passes_on(self) -> bool:
        """Whether the exception only says that another process failed."""
        return passes_on(self.exception)

    @property
    def is_of_a_test(self) -> bool:
        """Whether it only compares texts, as unittest does: ``AssertionError: 'one' != 'other'``."""
        return self.exception.startswith(("AssertionError: '", 'AssertionError: "'))


def last_words(tail: bytes) -> LastWords | None:
    """Return the traceback that ends the output, None where it does not end with one."""
    texts = _Peeled(tail)
    heads = (i for i in range(len(texts) - 1, -1, -1) if texts.is_head(i))
    head = next((i for i in heads if not _above(texts, i).startswith(_not_the_end())), None)
    if head is None:
        return None
    end = next((i for i in range(head + 1, len(texts)) if _ends(texts[i])), None)
    if end is None or not _EXCEPTION.match(texts[end]):
        return None
    behind = (i for i in range(end + 1, len(texts)) if texts[i].strip())
    if next(itertools.islice(behind, _MOST_BEHIND, None), None) is not None:
        return None
    first = head
    while (before := _direct_cause(texts, first)) is not None:
        first = before
    return LastWords(texts[end].strip(), tuple(texts[i] for i in range(first, len(texts))))


class _Peeled:
    """The lines of an output without prefixes; each is peeled when it is looked at, most are not."""

    def __init__(self, output: bytes) -> None:
        self._lines = output.decode("utf-8", "replace").splitlines()
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, at: int) -> str:
        if at not in self._texts:
            self._texts[at] = peel(strip_escapes(self._lines[at])).text
        return self._texts[at]

    def is_head(self, at: int) -> bool:
        """Return whether a traceback begins on a line."""
        return _HEAD[:9] in strip_escapes(self._lines[at]) and self[at].startswith(_HEAD)


def _ends(text: str) -> bool:
    """Return whether a line behind a traceback's head is no frame of it: not indented, not empty."""
    return bool(text.strip()) and not text.startswith((" ", "\t"))


def _direct_cause(texts: _Peeled, head: int) -> int | None:
    """Return where the traceback begins that the one at ``head`` names as its direct cause."""
    if not _above(texts, head).startswith(_CAUSE):
        return None
    return next((i for i in range(head - 1, -1, -1) if texts.is_head(i)), None)


def _above(texts: _Peeled, at: int) -> str:
    """Return the line above, over empty ones."""
    return next((texts[i] for i in range(at - 1, max(-1, at - 5), -1) if texts[i].strip()), "")


@functools.cache
def _not_the_end() -> tuple[str, ...]:
    table = next(iter(read_tables("wrappers", [Path(__file__).with_name("wrappers.toml")]).values()))
    return tuple(table["not_the_end"])
