"""oomguard's own output in a log: what it tells of a failure, of another rank's or of one that it remedied, is none of its own.

A line is passed over for its own form, never for where it stands: what others print in between is read. Known are a panel's lines by the
panel's title, an event by its name, the lines of an exception's note below it, and the JSON, Markdown and HTML that commands write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from oomguard.kinds import KINDS
from oomguard.observe.source import Line
from oomguard.observe.text import PlainLine

_EVENT: Final = "oomguard: "
_EVENT_AS_JSON: Final = '"logger": "oomguard"'
_OBJECT: Final = '{"schema": 1, "'
_OBJECTS: Final = ('"verdict": "', '"attempts": [', '"groups": [')
# What a diagnosis without a failure, and a plan, say in one line.
_NONE_FOUND: Final = ": no memory failure found"
_NO_FIT: Final = "does not fit: "
_TABLE: Final = "What oomguard did"
_PAGE: Final = '<main class="oomguard">'
_EVIDENCE: Final = "<details><summary>Evidence ("
_PAGE_ENDS, _EVIDENCE_ENDS = "</main>", "</details>"
_BEGINS: Final = (_EVENT, "{", "\u256d\u2500 ", "+- ", "<", _TABLE, _NO_FIT)
# Boxes as rich draws them, round or of ASCII; others' boxes (a traceback, an error of a command line) have other titles.
_TOP: Final = re.compile(r"(?:\u256d\u2500|\+-) (?P<title>[^\u2500]+?) ?[\u2500-]*[\u256e+]\s*\Z")
_SIDE: Final = re.compile(r"[\u2502|].*[\u2502|]\s*\Z")
_BOTTOM: Final = re.compile(r"(?:\u2570\u2500+\u256f|\+-{8,}\+)\s*\Z")
_START: Final = re.compile(r"start \d+\b")
_LEAST_CUT_CHARS: Final = 6
# A box is no longer than that; where its end is lost, or nobody looked at it, it ends there.
_MOST_LINES: Final = 200
_NOTED: Final = re.compile(r"  (?:why|where|budget|tried|change|do first|then|not changed|unknown|to decide|note): ")
_QUOTED: Final = re.compile(r"line \d+: ")
_KIND: Final = re.compile(rf"(?:\bkind=|\"kind\": \")({'|'.join(sorted(KINDS))})\b")


@dataclass(slots=True)
class _Writer:
    """What one process has printed of ours: the boxes that are open, innermost last, each with the line that it began on."""

    boxes: list[tuple[bool, int]] = field(default_factory=list)
    is_own: bool = False
    is_note: bool = False
    is_table: bool = False
    ends: str = ""


class OwnReports:
    """Tells which lines of an input are oomguard's own.

    Attributes:
        told: what they tell of, by kind where they name it, with the line that told it first.
    """

    def __init__(self) -> None:
        self._writers: dict[tuple[str, str | None], _Writer] = {}
        self.told: dict[str, int] = {}

    def takes(self, line: Line, plain: PlainLine, stream: str) -> bool:
        """Return whether the next line of a stream is our own."""
        writer = self._writers.get((stream, plain.process))
        if writer is None:
            begins = plain.text.startswith(_BEGINS) or plain.text.endswith(_NONE_FOUND)
            if not begins and _EVENT_AS_JSON not in line.text:
                return False
            writer = self._writers[stream, plain.process] = _Writer()
        if not line.continued:  # a segment of a long line is what its first one was
            writer.is_own = self._is_own(writer, line, plain.text)
        return writer.is_own

    @property
    def note(self) -> tuple[str, ...]:
        """What is told where an input holds no failure beside them."""
        if not self.told:
            return ()
        told = ", ".join(f"{what} (line {number})" for what, number in self.told.items())
        return (f"oomguard's own report is no failure of its own: {told}: read the log that it was made from",)

    def _is_own(self, writer: _Writer, line: Line, text: str) -> bool:
        if self._is_line(text) or _EVENT_AS_JSON in line.text:
            writer.is_note = text.startswith(_EVENT)
            self._names(_KIND.search(line.text), line)
            return True
        if (writer.is_note and _NOTED.match(text)) or (writer.is_table and text[:1] in {"", " "}):
            return True
        writer.is_note, writer.is_table = False, text.startswith(_TABLE)
        return writer.is_table or self._is_of_page(writer, line, text) or self._is_of_box(writer, line, text)

    @staticmethod
    def _is_line(text: str) -> bool:
        if text.startswith((_EVENT, _NO_FIT)) or text.endswith(_NONE_FOUND):
            return True
        return text.startswith(_OBJECT) and any(key in text for key in _OBJECTS)

    def _is_of_page(self, writer: _Writer, line: Line, text: str) -> bool:
        """Return whether a line is of a page, or one of the lines that a report in Markdown quotes."""
        if writer.ends:
            is_own = writer.ends == _PAGE_ENDS or _QUOTED.match(text) is not None
            if text.startswith(writer.ends) or (writer.ends == _PAGE_ENDS and _PAGE_ENDS in text):
                writer.ends = ""
            return is_own
        if text.startswith((_PAGE, _EVIDENCE)):
            whole = _PAGE_ENDS in text
            self.told.setdefault("a failure", line.number)
            writer.ends = _EVIDENCE_ENDS if text.startswith(_EVIDENCE) else "" if whole else _PAGE_ENDS
            return True
        return False

    def _is_of_box(self, writer: _Writer, line: Line, text: str) -> bool:
        if top := _TOP.match(text):
            kind = _kind_of(top["title"])
            is_own = kind is not None or _START.match(top["title"]) is not None
            if is_own or text.startswith("\u256d"):
                writer.boxes.append((is_own, line.number))
            if kind is not None:
                self.told.setdefault(kind, line.number)
            return is_own
        if writer.boxes and line.number - writer.boxes[-1][1] > _MOST_LINES:
            writer.boxes.clear()
        if not writer.boxes:
            return False
        if _BOTTOM.match(text):
            return writer.boxes.pop()[0]
        return writer.boxes[-1][0] and _SIDE.match(text) is not None

    def _names(self, found: re.Match[str] | None, line: Line) -> None:
        if found is not None:
            self.told.setdefault(found[1], line.number)


def _kind_of(title: str) -> str | None:
    """Return the kind that a box is titled with; a narrow one cuts it."""
    if title in KINDS:
        return title
    return next((kind for kind in KINDS if len(title) >= _LEAST_CUT_CHARS and kind.startswith(title)), None)
