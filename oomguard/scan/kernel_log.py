"""What the kernel's report of a kill for memory has in lines of their own: who had most, and the
host's memory.

Linux mm/oom_kill.c dump_tasks, 2.6 to 6.12: the columns between ``rss`` and the name differ by
version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from oomguard.core.facts import Fact

_HEADS: Final = ("Tasks state (memory values in pages)", "tgid total_vm")
_PAGE_BYTES: Final = 4096
# pid, uid, tgid and total_vm; then rss, and two to eight numbers before the name
_ROW: Final = re.compile(
    r"\[ *\d{1,10}\] +\d{1,10} +\d{1,10} +\d{1,15} +(\d{1,15})(?: +-?\d{1,15}){2,8} +(\S.{0,60})$"
)
# Between the table and the kernel's own words on whom it ended.
_NEAR_LINES: Final = 400
_BEGIN: Final = "invoked oom-killer"
# The report has the host's zones and nodes before its table of processes.
_REPORT_LINES: Final = 200
_RAM: Final = re.compile(r"\b(\d{3,15}) pages RAM\b")


@dataclass(slots=True)
class HostTasks:
    """The largest process of each table so far, by the lines of the table, and the host's memory by
    its line.
    """

    found: list[tuple[int, int, int, str]] = field(default_factory=list)
    totals: list[tuple[int, int]] = field(default_factory=list)
    _in_table: bool = False
    _lines_left: int = 0

    @property
    def is_open(self) -> bool:
        """Whether a report goes on, so that a line without any anchor may belong to it."""
        return self._in_table or self._lines_left > 0

    def see(self, text: str, line: int) -> None:
        """Take a line that begins a report or a table or, while one is open, may belong to it."""
        if any(head in text for head in _HEADS):
            if not self._in_table:
                self.found.append((line, line, 0, ""))
            self._in_table = True
            self._lines_left = 0
            return
        if _BEGIN in text:
            self._lines_left = _REPORT_LINES
        elif self._lines_left:
            self._lines_left -= 1
            if ram := _RAM.search(text):
                self.totals.append((line, int(ram.group(1)) * _PAGE_BYTES))
        if self._in_table:
            row = _ROW.search(text)
        else:
            row = None
        if row is None:
            self._in_table = False
            return
        first, _, most, name = self.found[-1]
        size = int(row.group(1)) * _PAGE_BYTES
        if size > most:
            self.found[-1] = (first, line, size, row.group(2).strip())
        else:
            self.found[-1] = (first, line, most, name)

    def facts(self, first_line: int, last_line: int) -> dict[str, Fact]:
        """Return who had most memory, and how much the host has, by the report beside a failure's
        lines.
        """
        facts = {}
        for line, total in self.totals:
            if first_line <= line <= last_line + _NEAR_LINES:
                facts["host_total_bytes"] = Fact("host_total_bytes", total, line=line)
        for first, last, size, name in self.found:
            if size and first_line - _NEAR_LINES <= last and first <= last_line + _NEAR_LINES:
                facts["host_holder"] = Fact("host_holder", name, line=first)
                facts["host_holder_bytes"] = Fact("host_holder_bytes", size, line=first)
                break
        return facts
